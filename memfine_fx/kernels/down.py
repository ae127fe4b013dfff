"""Rows of a window times one or two matrices of their experts, added to the rows' tokens in fp32.

The down projection is of one pair (activated rows, down); the gradient of the tokens of two (gate's and up's
gradients, and those matrices). Where experts have biases the down projection adds one, times the row's weight. Either a
row's result is added to its token by atomics, or it is written to [R,H] for `combine`, which adds a token's rows in the
same order in every run. Low-rank terms of the matrices are added to a row's result before that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.blocks import all_or_none, by_descriptor, load_rows, load_table, table_by_descriptor
from memfine_fx.kernels.computed_tables import argument_of, list_constants, loader_of, of_expert
from memfine_fx.kernels.launches import Launch, Tiles, launch
from memfine_fx.kernels.low_rank import add_term, constants_of_term, term_accesses
from memfine_fx.kernels.pairs import halved
from memfine_fx.kernels.sorting import Routing
from memfine_fx.kernels.tables import Table, Term
from memfine_fx.kernels.tile_search import find_tile, place_of
from memfine_fx.kernels.traffic import Access, Load, of_tiles
from memfine_fx.kernels.windows import Window, ceil_div, most_tiles

__all__ = ["add_products", "down_accesses", "reference_products"]


@triton.jit
def _add_product(
    total, rows, rows_block, matrix, matrix_block, row_places, first_own_row, expert, first_column,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STRIDE_EXPERT: tl.constexpr, STRIDE_COLUMN: tl.constexpr,
    STRIDE_DEPTH: tl.constexpr, PRECISION: tl.constexpr, LOAD: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    for begin in range(0, DEPTH, TILE_DEPTH):
        if BY_DESCRIPTOR:  # rows past the expert's are others', of which nothing is written
            left = rows_block.load([first_own_row, begin])
        else:
            left = load_rows(rows + row_places, begin, DEPTH, TILE_DEPTH)
        right = load_table(
            matrix, matrix_block, expert, first_column, begin, COLUMNS, DEPTH, STRIDE_EXPERT, STRIDE_COLUMN,
            STRIDE_DEPTH, LOAD, BY_DESCRIPTOR, TILE_COLUMNS, TILE_DEPTH,
        )  # fmt: skip
        total = tl.dot(left, right.to(left.dtype), total, input_precision=PRECISION)
    return total


@triton.jit
def _finish(
    total, order, bias, weight, result, rows, places, is_row, expert, first_column, COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr, BIAS_STRIDE_EXPERT: tl.constexpr, BIAS_STRIDE_COLUMN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, IS_ATOMIC: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add a tile to its tokens, or write it."""
    columns = first_column + tl.arange(0, TILE_COLUMNS)
    is_column = columns < COLUMNS
    is_output = is_row[:, None] & is_column[None, :]
    if HAS_BIAS:
        places_of_bias = bias + expert * BIAS_STRIDE_EXPERT + columns * BIAS_STRIDE_COLUMN
        addend = tl.load(places_of_bias, mask=is_column, other=0).to(tl.float32)[None, :]
        if HAS_WEIGHT:
            assignments = tl.load(order + rows, mask=is_row, other=0)
            addend = addend * tl.load(weight + assignments, mask=is_row, other=0).to(tl.float32)[:, None]
        total += addend
    if IS_ATOMIC:
        tokens = (tl.load(order + rows, mask=is_row, other=0) // TOP_K).to(tl.int64)
        tl.atomic_add(result + tokens[:, None] * COLUMNS + columns[None, :], total, mask=is_output, sem="relaxed")
    else:
        outputs = result + places * COLUMNS + columns[None, :]
        tl.store(outputs, total.to(result.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["first_row", "last_row"])
def _down_kernel(
    first,
    second,
    first_block,
    second_block,
    order,
    offsets,
    first_matrix,
    second_matrix,
    first_matrix_block,
    second_matrix_block,
    first_narrow,
    second_narrow,
    first_factor,
    second_factor,
    bias,
    weight,
    result,
    first_row,
    last_row,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_COLUMN: tl.constexpr,
    STRIDE_DEPTH: tl.constexpr,
    BIAS_STRIDE_EXPERT: tl.constexpr,
    BIAS_STRIDE_COLUMN: tl.constexpr,
    RANK: tl.constexpr,
    TERM_STRIDE_EXPERT: tl.constexpr,
    TERM_STRIDE_COLUMN: tl.constexpr,
    TERM_STRIDE_RANK: tl.constexpr,
    HAS_TERM: tl.constexpr,
    HAS_SECOND_TERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    IS_ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr,
    LIST_TYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    FIRST_LOAD: tl.constexpr,
    SECOND_LOAD: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    TILE_RANK: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    column_tile, row_tile = place_of(GROUP_ROWS)
    expert, start, stop = find_tile(offsets, row_tile, first_row, last_row, NUM_EXPERTS, EXPERTS_BLOCK, TILE_ROWS)
    if start >= stop:
        return
    rows = start + tl.arange(0, TILE_ROWS)
    is_row = rows < stop
    places = tl.where(is_row, rows - first_row, 0)[:, None]  # rows past the end read the window's first
    row_places = places * DEPTH
    first_column = column_tile * TILE_COLUMNS
    first_matrix = of_expert(first_matrix, expert, LIST_TYPE, IS_ALIGNED)
    second_matrix = of_expert(second_matrix, expert, LIST_TYPE, IS_ALIGNED)
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    total = _add_product(
        total, first, first_block, first_matrix, first_matrix_block, row_places, start - first_row, expert,
        first_column, COLUMNS, DEPTH, STRIDE_EXPERT, STRIDE_COLUMN, STRIDE_DEPTH, PRECISION, FIRST_LOAD, BY_DESCRIPTOR,
        TILE_COLUMNS, TILE_DEPTH,
    )  # fmt: skip
    if HAS_SECOND:
        total = _add_product(
            total, second, second_block, second_matrix, second_matrix_block, row_places, start - first_row, expert,
            first_column, COLUMNS, DEPTH, STRIDE_EXPERT, STRIDE_COLUMN, STRIDE_DEPTH, PRECISION, SECOND_LOAD,
            BY_DESCRIPTOR, TILE_COLUMNS, TILE_DEPTH,
        )  # fmt: skip
    if HAS_TERM:
        total = add_term(
            total, first_narrow, first_factor, rows - first_row, is_row, expert, first_column, COLUMNS, RANK,
            TERM_STRIDE_EXPERT, TERM_STRIDE_COLUMN, TERM_STRIDE_RANK, PRECISION, TILE_COLUMNS, TILE_RANK,
        )  # fmt: skip
        if HAS_SECOND_TERM:
            total = add_term(
                total, second_narrow, second_factor, rows - first_row, is_row, expert, first_column, COLUMNS, RANK,
                TERM_STRIDE_EXPERT, TERM_STRIDE_COLUMN, TERM_STRIDE_RANK, PRECISION, TILE_COLUMNS, TILE_RANK,
            )  # fmt: skip
    if TILE_COLUMNS >= 256:  # one half after the other, so that registers hold what half a tile takes
        half: tl.constexpr = TILE_COLUMNS // 2
        left, right = halved(total, TILE_ROWS, TILE_COLUMNS)
        _finish(
            left, order, bias, weight, result, rows, places, is_row, expert, first_column, COLUMNS, TOP_K,
            BIAS_STRIDE_EXPERT, BIAS_STRIDE_COLUMN, HAS_BIAS, HAS_WEIGHT, IS_ATOMIC, half,
        )  # fmt: skip
        _finish(
            right, order, bias, weight, result, rows, places, is_row, expert, first_column + half, COLUMNS, TOP_K,
            BIAS_STRIDE_EXPERT, BIAS_STRIDE_COLUMN, HAS_BIAS, HAS_WEIGHT, IS_ATOMIC, half,
        )  # fmt: skip
    else:
        _finish(
            total, order, bias, weight, result, rows, places, is_row, expert, first_column, COLUMNS, TOP_K,
            BIAS_STRIDE_EXPERT, BIAS_STRIDE_COLUMN, HAS_BIAS, HAS_WEIGHT, IS_ATOMIC, TILE_COLUMNS,
        )  # fmt: skip


def add_products(
    rows: Sequence[torch.Tensor],
    matrices: Sequence[Table],
    routing: Routing,
    window: Window,
    result: torch.Tensor,
    tiles: Tiles,
    precision: str,
    *,
    is_atomic: bool,
    bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    terms: Sequence[Term] = (),
) -> None:
    """Add the sum of rows[i] @ matrices[i][e].T to the tokens' sums, or write it row by row.

    Args:
        rows: one or two [R,D] of the window, contiguous.
        matrices: as many [E,C,D], of the same strides, or computed tile by tile.
        result: [T,C] fp32 where it is added to, else [R,C].
        precision: of products of fp32, "ieee" or "tf32".
        bias: [E,C], added to every row, times its weight where there is one.
        weight: [N] by assignment.
        terms: at most two, of factors of the same strides; added to every row.
    """
    matrix = matrices[0]
    num_experts, columns, depth = matrix.shape
    of_rows = [by_descriptor(tensor, [tiles.rows, tiles.depth], tiles) for tensor in (rows[0], rows[-1])]
    blocks = all_or_none([*of_rows, *(table_by_descriptor(table, tiles) for table in (matrix, matrices[-1]))])
    constants = {
        "COLUMNS": columns,
        "DEPTH": depth,
        "TOP_K": routing.top_k,
        "NUM_EXPERTS": num_experts,
        "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
        "STRIDE_EXPERT": matrix.stride(0),
        "STRIDE_COLUMN": matrix.stride(1),
        "STRIDE_DEPTH": matrix.stride(2),
        "BIAS_STRIDE_EXPERT": 0 if bias is None else bias.stride(0),
        "BIAS_STRIDE_COLUMN": 0 if bias is None else bias.stride(1),
        **constants_of_term(terms[0] if terms else None),
        "HAS_SECOND_TERM": len(terms) == 2,
        "HAS_BIAS": bias is not None,
        "HAS_WEIGHT": bias is not None and weight is not None,
        "HAS_SECOND": len(rows) == 2,
        "IS_ATOMIC": is_atomic,
        "PRECISION": precision,
        **list_constants(matrices),
        "FIRST_LOAD": loader_of(matrix),
        "SECOND_LOAD": loader_of(matrices[-1]),
        "BY_DESCRIPTOR": blocks[0] is not None,
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "TILE_DEPTH": tiles.depth,
        "GROUP_ROWS": tiles.group_rows,
    }
    arguments = {
        "first": rows[0],
        "second": rows[-1],
        "order": routing.order,
        "offsets": routing.offsets,
        "first_matrix": argument_of(matrix),
        "second_matrix": argument_of(matrices[-1]),
        "first_narrow": terms[0].rows if terms else result,
        "second_narrow": terms[-1].rows if terms else result,
        "first_factor": terms[0].matrix if terms else result,
        "second_factor": terms[-1].matrix if terms else result,
        "bias": result if bias is None else bias,
        "weight": result if bias is None or weight is None else weight,
        "result": result,
        "first_row": window.first,
        "last_row": window.last,
    }
    names = ("first_block", "second_block", "first_matrix_block", "second_matrix_block")
    arguments |= dict(zip(names, blocks, strict=True))
    num_tiles = most_tiles(window.num_rows, num_experts, tiles.rows)
    launch(_down_kernel, (ceil_div(columns, tiles.columns), num_tiles), arguments, constants, tiles)


def reference_products(
    rows: Sequence[torch.Tensor],
    matrices: Sequence[torch.Tensor],
    routing: Routing,
    window: Window,
    bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a window's products [R,C] in fp32, in plain torch, not yet added to tokens; zeros in rows of no expert."""
    result = rows[0].new_zeros((window.num_rows, matrices[0].shape[1]), dtype=torch.float32)
    for expert, (start, stop) in enumerate(routing.ranges(window)):
        here = slice(start - window.first, stop - window.first)
        for left, matrix in zip(rows, matrices, strict=True):
            result[here] += left[here].float() @ matrix[expert].to(left.dtype).float().T
        if bias is not None:
            shares = 1.0 if weight is None else weight[routing.order[start:stop].long(), None].float()
            result[here] += bias[expert].float() * shares
    return result


def down_accesses(launch: Launch, load: Load) -> list[Access]:
    """Return the loads and stores of one launch of the down kernel."""
    constants, rows, present = launch.constants, load.num_rows, load.num_present
    columns, depth, num_columns = constants["COLUMNS"], constants["DEPTH"], launch.grid[0]
    tiles, tile_rows = load.num_tiles(constants["TILE_ROWS"]), constants["TILE_ROWS"]
    has_share = constants["HAS_BIAS"] and constants["HAS_WEIGHT"]
    num_orders = constants["IS_ATOMIC"] + has_share
    accesses = [of_tiles(launch)]
    for name in ("first", "second") if constants["HAS_SECOND"] else ("first",):
        accesses.append(Access(name, tiles * tile_rows * depth * num_columns, rows * depth))
        accesses.append(Access(f"{name}_matrix", tiles * depth * columns, present * depth * columns))
    if num_orders:
        accesses.append(Access("order", num_orders * rows * num_columns, rows))
    if constants["HAS_BIAS"]:
        accesses.append(Access("bias", tiles * columns, present * columns))
    if has_share:
        accesses.append(Access("weight", rows * num_columns, rows))
    names = ("first", "second") if constants["HAS_SECOND_TERM"] else ("first",)
    accesses += term_accesses(launch, load, [(f"{name}_narrow", f"{name}_factor") for name in names], columns)
    if constants["IS_ATOMIC"]:
        return [*accesses, Access("result", rows * columns, load.num_tokens * columns, "atomic")]
    return [*accesses, Access("result", rows * columns, rows * columns, "store")]
