"""Low-rank terms of a projection: the narrow product, and its way into the wide one.

Before:  y = x @ (W[e] + s B[e] A[e]).T
After:   narrow = s (x @ A[e].T), [R,r] of a window, by a kernel of its own; y = x @ W[e].T + narrow @ B[e].T, of which
         the second product is added in the kernel of the first, while its tile is in registers.

Backward is of the same two kinds, with the factors' places changed: with y' the gradient of y,
    narrow' = s (y' @ B[e]); x' = y' @ W[e] + narrow' @ A[e]; A' = narrow'.T @ x and B' = y'.T @ narrow by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.blocks import load_rows, load_table
from memfine_fx.kernels.launches import Launch, Tiles, launch
from memfine_fx.kernels.sorting import Routing
from memfine_fx.kernels.tables import Term
from memfine_fx.kernels.tile_search import find_tile, place_of, places_of
from memfine_fx.kernels.traffic import Access, Load, of_tiles
from memfine_fx.kernels.windows import Window, ceil_div, most_tiles

__all__ = [
    "add_term", "constants_of_term", "narrow_accesses", "narrow_product", "reference_narrow_product", "term_accesses",
]  # fmt: skip

_MOST_RANK_AT_ONCE = 64


@triton.jit
def add_term(
    total, narrow, factor, own_rows, is_row, expert, first_column, COLUMNS: tl.constexpr, RANK: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr, STRIDE_COLUMN: tl.constexpr, STRIDE_RANK: tl.constexpr, PRECISION: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_RANK: tl.constexpr,
):  # fmt: skip
    """Add to a tile of a product the tile of narrow [R,r] times an expert's factor [C,r]."""
    for begin in tl.static_range(0, RANK, TILE_RANK):
        depth = begin + tl.arange(0, TILE_RANK)
        is_entry = is_row[:, None] & (depth < RANK)[None, :]
        left = tl.load(narrow + own_rows[:, None] * RANK + depth[None, :], mask=is_entry, other=0)
        right = load_table(
            factor, None, expert, first_column, begin, COLUMNS, RANK, STRIDE_EXPERT, STRIDE_COLUMN, STRIDE_RANK,
            "plain", False, TILE_COLUMNS, TILE_RANK,
        )  # fmt: skip
        total = tl.dot(left, right.to(left.dtype), total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["first_row", "last_row"])
def _narrow_kernel(
    rows,
    order,
    offsets,
    matrix,
    result,
    first_row,
    last_row,
    LENGTH: tl.constexpr,
    RANK: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_RANK: tl.constexpr,
    STRIDE_LENGTH: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    column_tile, row_tile = place_of(GROUP_ROWS)
    expert, start, stop = find_tile(offsets, row_tile, first_row, last_row, NUM_EXPERTS, EXPERTS_BLOCK, TILE_ROWS)
    if start >= stop:
        return
    numbers = start + tl.arange(0, TILE_ROWS)
    is_row = numbers < stop
    places = rows + places_of(order, numbers, is_row, first_row, TOP_K)[:, None] * LENGTH
    first_column = column_tile * TILE_COLUMNS
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for begin in range(0, LENGTH, TILE_DEPTH):
        left = load_rows(places, begin, LENGTH, TILE_DEPTH)
        right = load_table(
            matrix, None, expert, first_column, begin, RANK, LENGTH, STRIDE_EXPERT, STRIDE_RANK, STRIDE_LENGTH,
            "plain", False, TILE_COLUMNS, TILE_DEPTH,
        )  # fmt: skip
        total = tl.dot(left, right.to(left.dtype), total, input_precision=PRECISION)
    columns = first_column + tl.arange(0, TILE_COLUMNS)
    outputs = result + (numbers - first_row)[:, None] * RANK + columns[None, :]
    tl.store(outputs, (total * SCALE).to(result.dtype.element_ty), mask=is_row[:, None] & (columns < RANK)[None, :])


def narrow_product(
    rows: torch.Tensor,
    matrix: torch.Tensor,
    scale: float,
    routing: Routing,
    window: Window,
    result: torch.Tensor,
    tiles: Tiles,
    precision: str,
    *,
    is_gathered: bool,
) -> None:
    """Write scale * rows @ matrix[e].T of a window.

    Args:
        rows: [T,D] of all tokens, or [R,D] of the window; contiguous.
        matrix: [E,r,D].
        result: [R,r] in the rows' dtype, contiguous.
        precision: of products of fp32, "ieee" or "tf32".
        is_gathered: whether `rows` are the tokens'.
    """
    num_experts, rank, length = matrix.shape
    constants = {
        "LENGTH": length,
        "RANK": rank,
        "TOP_K": routing.top_k if is_gathered else 0,
        "NUM_EXPERTS": num_experts,
        "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
        "STRIDE_EXPERT": matrix.stride(0),
        "STRIDE_RANK": matrix.stride(1),
        "STRIDE_LENGTH": matrix.stride(2),
        "SCALE": scale,
        "PRECISION": precision,
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "TILE_DEPTH": tiles.depth,
        "GROUP_ROWS": tiles.group_rows,
    }
    arguments = {
        "rows": rows,
        "order": routing.order,
        "offsets": routing.offsets,
        "matrix": matrix,
        "result": result,
        "first_row": window.first,
        "last_row": window.last,
    }
    num_tiles = most_tiles(window.num_rows, num_experts, tiles.rows)
    launch(_narrow_kernel, (ceil_div(rank, tiles.columns), num_tiles), arguments, constants, tiles)


def constants_of_term(term: Term | None) -> dict[str, Any]:
    """Return the compile-time constants of a kernel that can add a low-rank term; `HAS_TERM` says whether it does."""
    rank = 0 if term is None else term.matrix.shape[2]
    strides = (0, 0, 0) if term is None else term.matrix.stride()
    return {
        "HAS_TERM": term is not None,
        "RANK": rank,
        "TERM_STRIDE_EXPERT": strides[0],
        "TERM_STRIDE_COLUMN": strides[1],
        "TERM_STRIDE_RANK": strides[2],
        "TILE_RANK": min(_MOST_RANK_AT_ONCE, max(16, triton.next_power_of_2(max(1, rank)))),
    }


def reference_narrow_product(
    rows: torch.Tensor, matrix: torch.Tensor, scale: float, routing: Routing, window: Window, *, is_gathered: bool
) -> torch.Tensor:
    """Compute `narrow_product` in plain torch, zeros in rows of no expert."""
    result = rows.new_zeros((window.num_rows, matrix.shape[1]))
    for expert, (start, stop) in enumerate(routing.ranges(window)):
        here = slice(start - window.first, stop - window.first)
        inputs = rows[routing.order[start:stop].long() // routing.top_k] if is_gathered else rows[here]
        result[here] = scale * (inputs @ matrix[expert].T.to(rows.dtype))
    return result


def narrow_accesses(launch: Launch, load: Load) -> list[Access]:
    """Return the loads and stores of one launch of the kernel of narrow products."""
    constants, rows, num_columns = launch.constants, load.num_rows, launch.grid[0]
    length, rank, tiles, tile_rows = (
        constants["LENGTH"],
        constants["RANK"],
        load.num_tiles(constants["TILE_ROWS"]),
        constants["TILE_ROWS"],
    )
    is_gathered = constants["TOP_K"] > 0
    num_distinct = load.num_tokens_read(tile_rows) if is_gathered else rows  # spare rows read the window's first
    accesses = [
        of_tiles(launch),
        Access("rows", tiles * tile_rows * length * num_columns, num_distinct * length),
        Access("matrix", tiles * rank * length, load.num_present * rank * length),
        Access("result", rows * rank, rows * rank, "store"),
    ]
    return [*accesses, Access("order", rows * num_columns, rows)] if is_gathered else accesses


def term_accesses(launch: Launch, load: Load, names: Sequence[tuple[str, str]], columns: int) -> list[Access]:
    """Return the loads of low-rank terms in one launch of a kernel.

    Args:
        names: those of each term's rows and factor among the launch's arguments.
        columns: C of each.
    """
    if not launch.constants["HAS_TERM"]:
        return []
    rank, tiles, rows = launch.constants["RANK"], load.num_tiles(launch.constants["TILE_ROWS"]), load.num_rows
    accesses, counted = [], list[Any]()
    for narrow, factor in names:
        # Gate and up of one parameter share their narrow rows, whose distinct elements count once.
        is_new = not any(launch.arguments[narrow] is tensor for tensor in counted)
        counted.append(launch.arguments[narrow])
        accesses.append(Access(narrow, rows * rank * launch.grid[0], rows * rank * is_new))
        accesses.append(Access(factor, tiles * rank * columns, load.num_present * rank * columns))
    return accesses
