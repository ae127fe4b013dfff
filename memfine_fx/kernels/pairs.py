"""Tiles of gate's and up's products: two tensors of [R,F], or one of [R,2F] in which their columns alternate.

Where a parameter holds gate and up column by column, what belongs to it does too: a tile of both is one piece of
memory, and threads that have an entry of gate have up's beside it. Apart, each would be every other entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.multiprocessing.reductions import StorageWeakRef

from memfine_fx.kernels.tables import Table

__all__ = ["are_interleaved", "halved", "load_pair", "split_pair", "store_pair"]


def are_interleaved(pair: Sequence[Table]) -> bool:
    """Return whether gate's [R,F] and up's are every other column of one tensor, gate's the first.

    The same holds of tables [E,F,H] that alternate along F.
    """
    gate, up = pair
    if not (isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)):
        return False
    if gate.stride(1) != 2 or up.storage_offset() - gate.storage_offset() != 1:
        return False
    return bool(StorageWeakRef(gate.untyped_storage()) == StorageWeakRef(up.untyped_storage()))


@triton.jit
def halved(tile, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Return the first half of a tile's columns, and the second: each thread holds the entries that it had."""
    half: tl.constexpr = TILE_COLUMNS // 2
    return tl.split(tl.permute(tl.reshape(tile, [TILE_ROWS, 2, half]), [0, 2, 1]))


@triton.jit
def split_pair(both, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Return (gate's, up's) of a tile [ROWS, 2 COLUMNS] in which their columns alternate."""
    return tl.split(tl.reshape(both, [TILE_ROWS, TILE_COLUMNS, 2]))


@triton.jit
def load_pair(
    gate, up, row_places, first_column, is_row, WIDTH: tl.constexpr, STRIDE: tl.constexpr, HAS_UP: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load (gate's, up's) tiles in fp32; up's is gate's again where there is no up projection.

    Args:
        row_places: [ROWS,1], of each row in either tensor.
        STRIDE: of columns, where they are apart.
    """
    if IS_INTERLEAVED:
        columns = 2 * first_column + tl.arange(0, 2 * TILE_COLUMNS)
        is_entry = is_row[:, None] & (columns < 2 * WIDTH)[None, :]
        both = tl.load(gate + row_places + columns[None, :], mask=is_entry, other=0).to(tl.float32)
        gate_tile, up_tile = split_pair(both, TILE_ROWS, TILE_COLUMNS)
    else:
        columns = first_column + tl.arange(0, TILE_COLUMNS)
        is_entry = is_row[:, None] & (columns < WIDTH)[None, :]
        places = row_places + columns[None, :] * STRIDE
        gate_tile = tl.load(gate + places, mask=is_entry, other=0).to(tl.float32)
        if HAS_UP:  # noqa: SIM108 - decided when it is compiled
            up_tile = tl.load(up + places, mask=is_entry, other=0).to(tl.float32)
        else:
            up_tile = gate_tile
    return gate_tile, up_tile


@triton.jit
def store_pair(
    gate, up, gate_tile, up_tile, row_places, first_column, is_row, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    HAS_UP: tl.constexpr, IS_INTERLEAVED: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write tiles where `load_pair` reads them."""
    if IS_INTERLEAVED:
        columns = 2 * first_column + tl.arange(0, 2 * TILE_COLUMNS)
        is_entry = is_row[:, None] & (columns < 2 * WIDTH)[None, :]
        both = tl.interleave(gate_tile, up_tile).to(gate.dtype.element_ty)
        tl.store(gate + row_places + columns[None, :], both, mask=is_entry)
    else:
        columns = first_column + tl.arange(0, TILE_COLUMNS)
        is_entry = is_row[:, None] & (columns < WIDTH)[None, :]
        places = row_places + columns[None, :] * STRIDE
        tl.store(gate + places, gate_tile.to(gate.dtype.element_ty), mask=is_entry)
        if HAS_UP:
            tl.store(up + places, up_tile.to(up.dtype.element_ty), mask=is_entry)
