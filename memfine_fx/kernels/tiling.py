"""Tile sizes of a layer's kernels by target and dtype: a short list each, of what compiles without spills.

benchmarks/results/gpu_kernels.json says what each takes of a target. `tuning` times the lists on a device; nowhere else
was anything timed, and the first of each list stands.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from memfine_fx.kernels.launches import Tiles

__all__ = ["LEAST_COLUMNS", "AdapterTiles", "LayerTiles", "candidates", "target_of", "tiles_for"]


@dataclass(frozen=True)
class LayerTiles:
    """The tile sizes of a layer's kernels, by their names; `down` also of the tokens' gradient."""

    gate_up: Tiles
    down: Tiles
    down_backward: Tiles
    weight_gradient: Tiles


@dataclass(frozen=True)
class AdapterTiles:
    """The tile sizes of an adapter's products: narrow rows, and gradients of its factors, [r,D] and [C,r]."""

    narrow: Tiles
    flat: Tiles
    tall: Tiles

    @staticmethod
    def of(tiles: LayerTiles, rank: int) -> AdapterTiles:
        """Return the tiles of the layer's kernels, made as narrow as the rank.

        Rows of 64 are the least for Hopper's products.
        """
        least = min(64, max(16, 1 << (rank - 1).bit_length()))
        rows, gradient = tiles.down_backward, tiles.weight_gradient
        return AdapterTiles(
            narrow=replace(rows, columns=least),
            flat=replace(gradient, rows=min(gradient.rows, 64), num_warps=4),
            tall=replace(gradient, columns=least),
        )


_LOW_PRECISION = {
    "sm_80": LayerTiles(
        gate_up=Tiles(128, 64, 64, num_warps=8, num_stages=3),
        down=Tiles(128, 64, 64, num_warps=8, num_stages=3),
        down_backward=Tiles(64, 64, 64, num_warps=8, num_stages=3),
        weight_gradient=Tiles(128, 64, 64, num_warps=8, num_stages=5),
    ),
    "sm_90": LayerTiles(
        gate_up=Tiles(128, 128, 64, num_warps=8, num_stages=4, group_rows=8, by_descriptor=True),
        down=Tiles(128, 256, 64, num_warps=8, num_stages=4, group_rows=8, by_descriptor=True),
        down_backward=Tiles(64, 128, 64, num_warps=4, num_stages=3, by_descriptor=True),
        weight_gradient=Tiles(128, 128, 64, num_warps=8, num_stages=5, by_descriptor=True),
    ),
    "sm_100": LayerTiles(
        gate_up=Tiles(128, 64, 64, num_warps=8, num_stages=3),
        down=Tiles(128, 128, 64, num_warps=8, num_stages=3),
        down_backward=Tiles(128, 64, 64, num_warps=8, num_stages=3),
        weight_gradient=Tiles(128, 128, 64, num_warps=8, num_stages=5),
    ),
    "gfx942": LayerTiles(
        gate_up=Tiles(128, 64, 32, num_warps=4, num_stages=2),
        down=Tiles(128, 128, 32, num_warps=8, num_stages=2),
        down_backward=Tiles(128, 64, 32, num_warps=4, num_stages=2),
        weight_gradient=Tiles(64, 64, 32, num_warps=4, num_stages=2),
    ),
}
# Tables in 32 bits beside rows in 16: their blocks take twice the shared memory, and are cast in registers.
_WIDE_TABLES = {
    "sm_90": LayerTiles(
        gate_up=Tiles(128, 128, 64, num_warps=8, num_stages=3),
        down=Tiles(128, 128, 64, num_warps=8, num_stages=3),
        down_backward=Tiles(128, 128, 64, num_warps=8, num_stages=3),
        weight_gradient=Tiles(128, 128, 64, num_warps=8, num_stages=5),
    ),
}
_FULL_PRECISION = LayerTiles(
    gate_up=Tiles(64, 32, 32, num_warps=4, num_stages=2),
    down=Tiles(64, 64, 32, num_warps=8, num_stages=2),
    down_backward=Tiles(64, 32, 32, num_warps=4, num_stages=2),
    weight_gradient=Tiles(64, 32, 32, num_warps=8, num_stages=2),
)
# NOTE: rows of a weight gradient are gathered by ids that the same loop loads. Triton then fetches half as many steps
# ahead: 5 stages stand for two, as 3 do elsewhere.
_OTHERS: dict[str, dict[str, tuple[Tiles, ...]]] = {
    "sm_80": {
        "gate_up": (Tiles(128, 64, 64, 8, 4), Tiles(64, 64, 64, 4, 4), Tiles(64, 128, 64, 8, 3)),
        "down": (Tiles(128, 64, 64, 8, 4), Tiles(128, 64, 64, 4, 3), Tiles(64, 64, 64, 4, 3)),
        "down_backward": (Tiles(64, 64, 64, 8, 4), Tiles(128, 32, 64, 8, 4), Tiles(64, 32, 64, 4, 4)),
        "weight_gradient": (Tiles(64, 64, 64, 4, 5), Tiles(64, 128, 64, 8, 5), Tiles(128, 64, 32, 8, 7)),
    },
    "sm_90": {
        "gate_up": (
            Tiles(128, 128, 64, 8, 3),
            Tiles(128, 64, 64, 8, 3),
            Tiles(128, 64, 64, 8, 4),
        ),
        "down": (
            Tiles(128, 128, 64, 8, 3, by_descriptor=True),
            Tiles(128, 128, 64, 8, 3),
            Tiles(128, 256, 64, 8, 3),
        ),
        "down_backward": (
            Tiles(128, 256, 64, 8, 4, by_descriptor=True),
            Tiles(128, 128, 64, 8, 4, by_descriptor=True),
            Tiles(64, 128, 64, 4, 3),
            Tiles(128, 128, 64, 8, 4),
        ),
        "weight_gradient": (
            Tiles(128, 256, 64, 8, 5, by_descriptor=True),
            Tiles(128, 128, 64, 8, 5),
            Tiles(64, 128, 64, 4, 5),
        ),
    },
    "sm_100": {
        "gate_up": (Tiles(128, 64, 64, 8, 4), Tiles(128, 64, 64, 8, 4, by_descriptor=True), Tiles(64, 128, 64, 8, 3)),
        "down": (Tiles(128, 128, 64, 8, 4), Tiles(128, 128, 64, 8, 4, by_descriptor=True), Tiles(64, 128, 64, 4, 4)),
        "down_backward": (Tiles(64, 64, 64, 4, 3), Tiles(128, 32, 64, 8, 4), Tiles(64, 32, 64, 4, 4)),
        "weight_gradient": (Tiles(64, 64, 64, 8, 5), Tiles(64, 128, 64, 4, 5), Tiles(128, 64, 64, 4, 5)),
    },
    "gfx942": {
        "gate_up": (Tiles(128, 128, 32, 8, 2), Tiles(128, 64, 32, 8, 2), Tiles(64, 64, 32, 4, 2)),
        "down": (Tiles(128, 128, 64, 8, 2), Tiles(128, 64, 32, 4, 2), Tiles(64, 64, 32, 4, 2)),
        "down_backward": (Tiles(128, 64, 32, 8, 2), Tiles(64, 64, 32, 4, 2), Tiles(64, 32, 32, 4, 2)),
        "weight_gradient": (Tiles(128, 64, 32, 8, 2), Tiles(64, 64, 32, 8, 2), Tiles(64, 32, 32, 4, 2)),
    },
}
"""Tiles that are timed beside them, in 16 bits: larger, of other shapes of the same size, more stages, fewer warps."""


@functools.cache
def target_of(device: torch.device) -> str:
    """Return the target whose tiles a device takes; the interpreter takes those of sm_80.

    It is cached for each device, since it asks the driver.
    """
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def tiles_for(target: str, dtype: torch.dtype, table_dtype: torch.dtype | None = None) -> LayerTiles:
    """Return the tiles for rows of a dtype on a target of `target_of`, where nothing was timed.

    Args:
        table_dtype: of the tables, where it is another. Dequantizing bytes takes registers, and so the smallest tiles.
    """
    if dtype is torch.float32:
        return _FULL_PRECISION
    if table_dtype is not None and table_dtype.itemsize == 1:
        return _LOW_PRECISION["gfx942" if target == "gfx942" else "sm_80"]
    tiles = _LOW_PRECISION[target]
    return _WIDE_TABLES.get(target, tiles) if table_dtype is torch.float32 else tiles


def candidates(target: str, dtype: torch.dtype, name: str, table_dtype: torch.dtype | None = None) -> tuple[Tiles, ...]:
    """Return the tiles of one kernel, named as in `LayerTiles`, that may be timed; first those of `tiles_for`."""
    first: Tiles = getattr(tiles_for(target, dtype, table_dtype), name)
    if dtype is torch.float32:
        return (first,)
    others = (tiles for tiles in _OTHERS[target][name] if tiles != first)
    return (first, *(tiles for tiles in others if table_dtype is not torch.float32 or not tiles.by_descriptor))


LEAST_COLUMNS = min(
    tiles.columns
    for target in _LOW_PRECISION
    for dtype in (torch.bfloat16, torch.float32)
    for tiles in candidates(target, dtype, "down_backward")
)
"""The fewest columns of a tile on any target: each tile of columns has a part of the routing weight's gradient."""
