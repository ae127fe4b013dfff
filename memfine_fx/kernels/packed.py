"""Sources that dequantize packed numbers tile by tile: text that kernels are compiled with (`computed_tables`).

four_bits      two numbers a byte, the first in its upper half, each a place among 16 codes, times a scale for each
               block of numbers that follow each other: NF4 and FP4 as bitsandbytes has them (QLoRA, arXiv
               2305.14314)
microscaling   two E2M1 numbers a byte, the first in its lower half, times a power of two for 32 of them (MXFP4, OCP
               Microscaling Formats 1.0)
scaled_blocks  numbers of any dtype times a scale for each block of rows and columns (DeepSeek-V3's FP8, int8)
"""

from __future__ import annotations

from memfine_fx.kernels.tables import TileSource

__all__ = ["FP4", "NF4", "four_bits", "microscaling", "scaled_blocks"]

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The codes of bitsandbytes' "nf4"."""
_FP4_MAGNITUDES = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
FP4 = (*_FP4_MAGNITUDES, *(-magnitude for magnitude in _FP4_MAGNITUDES))
"""The codes of bitsandbytes' "fp4"."""
_HEAD = "@triton.jit\ndef entries(parts, expert, row, column, is_entry):"
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_E2M1_MAGNITUDES, *(-magnitude for magnitude in _E2M1_MAGNITUDES))


def four_bits(shape: tuple[int, int], block: int, codes: tuple[float, ...] = NF4) -> TileSource:
    """Return the source for packed uint8 [E,..], half as many as numbers, and scales fp32 [E,..], one a block.

    Args:
        shape: of an expert's matrix, whose numbers follow each other row by row.
        block: numbers with one scale; divides them.
    """
    size = shape[0] * shape[1]
    source = f"""\
    scale = tl.load(parts[1] + expert.to(tl.int64) * {size // block} + place // {block}, mask=is_entry, other=0)
    return tl.load(parts[2] + code) * scale.to(tl.float32)
"""
    return TileSource(_HEAD + _code(shape, "byte >> 4", "byte & 15") + source, shape, 2, codes)


def microscaling(shape: tuple[int, int]) -> TileSource:
    """Return the source for blocks uint8 [E,C,D/32,16] and exponents uint8 [E,C,D/32], 127 of which is 1."""
    size = shape[0] * shape[1]
    source = f"""\
    exponent = tl.load(parts[1] + expert.to(tl.int64) * {size // 32} + place // 32, mask=is_entry, other=127)
    return tl.load(parts[2] + code) * tl.exp2(exponent.to(tl.float32) - 127)
"""
    return TileSource(_HEAD + _code(shape, "byte & 15", "byte >> 4") + source, shape, 2, _E2M1)


def scaled_blocks(shape: tuple[int, int], block: tuple[int, int]) -> TileSource:
    """Return the source for numbers [E,C,D] and scales [E,ceil(C/rows),ceil(D/columns)].

    Args:
        block: rows and columns with one scale.
    """
    (rows, columns), across = block, -(-shape[1] // block[1])
    scales = -(-shape[0] // rows) * across
    source = f"""
    entry = tl.load(
        parts[0] + expert.to(tl.int64) * {shape[0] * shape[1]} + row * {shape[1]} + column, mask=is_entry, other=0
    )
    place = row // {rows} * {across} + column // {columns}
    scale = tl.load(parts[1] + expert.to(tl.int64) * {scales} + place, mask=is_entry, other=0)
    return entry.to(tl.float32) * scale.to(tl.float32)
"""
    return TileSource(_HEAD + source, shape, 2)


def _code(shape: tuple[int, int], first: str, second: str) -> str:
    """Return the text that finds an entry's place among all of a matrix and, of two a byte, its four bits."""
    size = shape[0] * shape[1]
    return f"""
    place = row * {shape[1]} + column
    byte = tl.load(parts[0] + expert.to(tl.int64) * {size // 2} + place // 2, mask=is_entry, other=0).to(tl.int32)
    code = tl.where(place % 2 == 0, {first}, {second})
"""
