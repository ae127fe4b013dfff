"""Gradients of the experts' matrices, straight into their tables: rows of an expert in a window, left.T @ right.

An expert that a window's border cuts is finished by the window that has its last row. Until then its sums stay in fp32,
in one of two stages: at every border at most one expert is cut, so a window reads what the one before left in one
stage and leaves what is cut at its own end in the other. An expert without rows gets zeros from the first window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from memfine_fx.runtime.kernels.launches import Tiles, launch
from memfine_fx.runtime.kernels.sorting import Routing
from memfine_fx.runtime.kernels.windows import Window, ceil_div

__all__ = ["new_stages", "reference_weight_gradient", "weight_gradient"]


@triton.jit
def _finish(
    total, table, found, left_over, entries, places, is_entry, is_continued, is_cut,
):  # fmt: skip
    """Add what earlier windows found, and write to the table or, for a later window, to the stage."""
    if is_continued:
        total += tl.load(found + places, mask=is_entry, other=0)
    if is_cut:
        tl.store(left_over + places, total, mask=is_entry)
    else:
        tl.store(table + entries, total.to(table.dtype.element_ty), mask=is_entry)


@triton.jit(do_not_specialize=["first_row", "last_row"])
def _weight_gradient_kernel(
    first,
    second,
    tokens,
    order,
    offsets,
    first_table,
    second_table,
    first_found,
    second_found,
    first_left,
    second_left,
    first_row,
    last_row,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_HEIGHT: tl.constexpr,
    STRIDE_WIDTH: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    IS_FIRST_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):
    expert = tl.program_id(1)
    own_begin = tl.load(offsets + expert).to(tl.int32)
    own_end = tl.load(offsets + expert + 1).to(tl.int32)
    begin, end = tl.maximum(own_begin, first_row), tl.minimum(own_end, last_row)
    is_empty = IS_FIRST_WINDOW & (own_begin == own_end)
    if (begin >= end) & (is_empty == 0):
        return
    num_columns: tl.constexpr = tl.cdiv(WIDTH, TILE_COLUMNS)
    heights = tl.program_id(0) // num_columns * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(0) % num_columns * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_height, is_column = heights < HEIGHT, columns < WIDTH
    first_total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    second_total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(begin, end, TILE_DEPTH):
        rows = start + tl.arange(0, TILE_DEPTH)
        is_row = rows < end
        token = (tl.load(order + rows, mask=is_row, other=0) // TOP_K).to(tl.int64)
        gathered = tl.load(
            tokens + token[:, None] * WIDTH + columns[None, :], mask=is_row[:, None] & is_column[None, :], other=0
        )
        left_places = (rows - first_row)[:, None] * HEIGHT + heights[None, :]
        is_left = is_row[:, None] & is_height[None, :]
        left = tl.load(first + left_places, mask=is_left, other=0)
        first_total = tl.dot(tl.trans(left), gathered, first_total, input_precision=PRECISION)
        if HAS_SECOND:
            left = tl.load(second + left_places, mask=is_left, other=0)
            second_total = tl.dot(tl.trans(left), gathered, second_total, input_precision=PRECISION)
    is_entry = is_height[:, None] & is_column[None, :]
    entries = expert.to(tl.int64) * STRIDE_EXPERT + heights[:, None].to(tl.int64) * STRIDE_HEIGHT
    entries += columns[None, :].to(tl.int64) * STRIDE_WIDTH
    places = heights[:, None] * WIDTH + columns[None, :]
    is_continued = own_begin < first_row
    is_cut = (own_end > last_row) & (begin < end)  # experts without rows stand anywhere, and are complete
    _finish(first_total, first_table, first_found, first_left, entries, places, is_entry, is_continued, is_cut)
    if HAS_SECOND:
        _finish(second_total, second_table, second_found, second_left, entries, places, is_entry, is_continued, is_cut)


Stages = tuple[torch.Tensor, torch.Tensor]


def new_stages(tables: Sequence[torch.Tensor], *, is_cut: bool = True) -> list[Stages]:
    """For every table [E,A,B] two stages of one expert, [A,B] fp32; never read before they are written.

    Args:
        is_cut: whether a window may cut an expert; in a layer of one window there is nothing to stage.
    """
    sizes = [tuple(table.shape[1:]) if is_cut else (1,) for table in tables]
    return [
        (table.new_empty(size, dtype=torch.float32), table.new_empty(size, dtype=torch.float32))
        for table, size in zip(tables, sizes, strict=True)
    ]


def weight_gradient(
    rows: Sequence[torch.Tensor],
    tokens: torch.Tensor,
    routing: Routing,
    window: Window,
    tables: Sequence[torch.Tensor],
    stages: Sequence[Stages],
    tiles: Tiles,
    precision: str,
) -> None:
    """Add a window's rows[i].T @ tokens[order // K] of every expert to tables[i].

    Windows come in order, each once.

    Args:
        rows: one or two [R,A] of the window, contiguous.
        tokens: [T,B], contiguous, gathered row by row.
        tables: as many [E,A,B] of the same strides; what they hold before is never read.
        stages: from `new_stages` for all windows of a layer.
        precision: of products of fp32, "ieee" or "tf32".
    """
    table = tables[0]
    num_experts, height, width = table.shape
    found, left = window.number % 2, (window.number + 1) % 2
    constants = {
        "HEIGHT": height,
        "WIDTH": width,
        "TOP_K": routing.top_k,
        "STRIDE_EXPERT": table.stride(0),
        "STRIDE_HEIGHT": table.stride(1),
        "STRIDE_WIDTH": table.stride(2),
        "HAS_SECOND": len(rows) == 2,
        "IS_FIRST_WINDOW": window.number == 0,
        "PRECISION": precision,
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "TILE_DEPTH": tiles.depth,
    }
    arguments = {
        "first": rows[0],
        "second": rows[-1],
        "tokens": tokens,
        "order": routing.order,
        "offsets": routing.offsets,
        "first_table": table,
        "second_table": tables[-1],
        "first_found": stages[0][found],
        "second_found": stages[-1][found],
        "first_left": stages[0][left],
        "second_left": stages[-1][left],
        "first_row": window.first,
        "last_row": window.last,
    }
    grid = (ceil_div(height, tiles.rows) * ceil_div(width, tiles.columns), num_experts)
    launch(_weight_gradient_kernel, grid, arguments, constants, tiles)


def reference_weight_gradient(
    rows: torch.Tensor, tokens: torch.Tensor, routing: Routing, window: Window, total: torch.Tensor
) -> None:
    """Add a window's part to `total`, [E,A,B] fp32, in plain torch."""
    for expert, (start, stop) in enumerate(routing.ranges(window)):
        gathered = tokens[routing.order[start:stop].long() // routing.top_k].float()
        total[expert] += rows[start - window.first : stop - window.first].float().T @ gathered
