"""The tile that a program computes and the expert whose rows it has, found from the offsets without a list of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["find_tile", "place_of", "places_of"]


@triton.jit
def place_of(GROUP_ROWS: tl.constexpr):
    """Return (tile of columns, tile of rows) of a program of a grid (columns, rows).

    Programs that run at once take a block of so many tiles of rows and as many columns as there are units for, instead
    of all columns of one tile of rows: a table of experts crosses to L2 once a group of rows and not once a tile.
    """
    row, column = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), GROUP_ROWS)
    return column, row


@triton.jit
def find_tile(
    offsets,
    tile,
    first_row,
    last_row,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Return (expert, first row, end) of a window's tile of this number; no rows where the window has fewer tiles.

    `EXPERTS_BLOCK` is a power of two of at least E.
    """
    experts = tl.arange(0, EXPERTS_BLOCK)
    is_expert = experts < NUM_EXPERTS
    begins = tl.load(offsets + experts, mask=is_expert, other=0).to(tl.int32)
    ends = tl.load(offsets + experts + 1, mask=is_expert, other=0).to(tl.int32)
    counts = tl.maximum(tl.minimum(ends, last_row) - tl.maximum(begins, first_row), 0)
    num_tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    is_before = tl.cumsum(num_tiles, 0) <= tile
    expert = tl.minimum(tl.sum(is_before.to(tl.int32), 0), NUM_EXPERTS - 1)
    is_found = tile < tl.sum(num_tiles, 0)
    earlier = tl.sum(tl.where(is_before, num_tiles, 0), 0)
    begin = tl.maximum(tl.load(offsets + expert).to(tl.int32), first_row)
    start = begin + (tile - earlier) * TILE_ROWS
    stop = tl.minimum(tl.load(offsets + expert + 1).to(tl.int32), last_row)
    return expert, start, tl.where(is_found, tl.minimum(stop, start + TILE_ROWS), start)


@triton.jit
def places_of(order, rows, is_row, first_row, TOP_K: tl.constexpr):
    """Return where a window's rows are in the tensor they are read from: at their tokens or, if K is 0, in the window.

    Rows that are not read get the first place; all are read where `is_row` is None.
    """
    if TOP_K > 0:
        if is_row is None:
            places = tl.load(order + rows) // TOP_K
        else:
            places = tl.load(order + rows, mask=is_row, other=0) // TOP_K
    elif is_row is None:
        places = rows - first_row
    else:
        places = tl.where(is_row, rows - first_row, 0)
    return places.to(tl.int64)
