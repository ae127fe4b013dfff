"""Gradients that pass the down projection: of gate's and up's products, of the routing weight; and the activated rows.

Before:  p = (grad[order // K] @ down[e]); weight_grad = (p * act(g, u)).sum(-1); (g', u') = act'(g, u, p * weight)
         With biases weight_grad has grad . down_bias[e] too.
After:   one kernel; g' and u' may be written over g and u. The routing weight's gradient comes in a part for every
         tile of columns, [tiles,N] by assignment, each written once: a sum over them is the same in every run.
         A low-rank term of down is added to p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.activation import (
    activate,
    activate_backward,
    constants_of,
    reference_activation,
)
from memfine_fx.kernels.blocks import load_rows, load_table, table_by_descriptor
from memfine_fx.kernels.computed_tables import argument_of, list_constants, loader_of, of_expert
from memfine_fx.kernels.launches import Launch, Tiles, launch
from memfine_fx.kernels.low_rank import add_term, constants_of_term, term_accesses
from memfine_fx.kernels.pairs import are_interleaved, halved, load_pair, store_pair
from memfine_fx.kernels.sorting import Routing
from memfine_fx.kernels.tables import Activation, ActivationName, Tables, Term, has_up, standing
from memfine_fx.kernels.tile_search import find_tile, place_of
from memfine_fx.kernels.traffic import Access, Load, of_tiles
from memfine_fx.kernels.windows import Window, ceil_div, most_tiles

__all__ = ["down_backward", "down_backward_accesses", "num_weight_parts", "reference_down_backward"]


@triton.jit
def _finish(
    total, share, gate_rows, up_rows, gate_grad, up_grad, activated, own_rows, is_row, first_column,
    WIDTH: tl.constexpr, PRODUCT_STRIDE_ROW: tl.constexpr, PRODUCT_STRIDE_WIDTH: tl.constexpr,
    GRADIENT_STRIDE_ROW: tl.constexpr, HAS_UP: tl.constexpr, HAS_INTERLEAVED_PRODUCTS: tl.constexpr,
    HAS_INTERLEAVED_GRADIENTS: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_BACKWARD: tl.constexpr,
    WRITES_ACTIVATED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write what follows from a tile of grad @ down; its part of the routing weight's gradient, [ROWS]."""
    gate_tile, up_tile = load_pair(
        gate_rows, up_rows, own_rows[:, None] * PRODUCT_STRIDE_ROW, first_column, is_row, WIDTH, PRODUCT_STRIDE_WIDTH,
        HAS_UP, HAS_INTERLEAVED_PRODUCTS, TILE_ROWS, TILE_COLUMNS,
    )  # fmt: skip
    columns = first_column + tl.arange(0, TILE_COLUMNS)
    is_own = is_row[:, None] & (columns < WIDTH)[None, :]
    result = activate(gate_tile, up_tile, ACTIVATION)
    part = tl.sum(tl.where(is_own, total * result, 0.0), 1)
    if WRITES_ACTIVATED:
        own = own_rows[:, None] * WIDTH + columns[None, :]
        tl.store(activated + own, (result * share).to(activated.dtype.element_ty), mask=is_own)
    gate_tile, up_tile = activate_backward(gate_tile, up_tile, total * share, ACTIVATION_BACKWARD)
    store_pair(
        gate_grad, up_grad, gate_tile, up_tile, own_rows[:, None] * GRADIENT_STRIDE_ROW, first_column, is_row, WIDTH, 1,
        HAS_UP, HAS_INTERLEAVED_GRADIENTS, TILE_COLUMNS,
    )  # fmt: skip
    return part


@triton.jit
def _finish_parts(
    total, share, gate_rows, up_rows, gate_grad, up_grad, activated, own_rows, is_row, first_column,
    WIDTH: tl.constexpr, PRODUCT_STRIDE_ROW: tl.constexpr, PRODUCT_STRIDE_WIDTH: tl.constexpr,
    GRADIENT_STRIDE_ROW: tl.constexpr, HAS_UP: tl.constexpr, HAS_INTERLEAVED_PRODUCTS: tl.constexpr,
    HAS_INTERLEAVED_GRADIENTS: tl.constexpr, ACTIVATION: tl.constexpr, ACTIVATION_BACKWARD: tl.constexpr,
    WRITES_ACTIVATED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PART_COLUMNS: tl.constexpr,
):  # fmt: skip
    """`_finish` of so many columns after so many, so that registers hold what a part of the tile takes."""
    if TILE_COLUMNS <= PART_COLUMNS:
        part = _finish(
            total, share, gate_rows, up_rows, gate_grad, up_grad, activated, own_rows, is_row, first_column, WIDTH,
            PRODUCT_STRIDE_ROW, PRODUCT_STRIDE_WIDTH, GRADIENT_STRIDE_ROW, HAS_UP, HAS_INTERLEAVED_PRODUCTS,
            HAS_INTERLEAVED_GRADIENTS, ACTIVATION, ACTIVATION_BACKWARD, WRITES_ACTIVATED, TILE_ROWS, TILE_COLUMNS,
        )  # fmt: skip
    else:
        half: tl.constexpr = TILE_COLUMNS // 2
        left, right = halved(total, TILE_ROWS, TILE_COLUMNS)
        part = _finish_parts(
            left, share, gate_rows, up_rows, gate_grad, up_grad, activated, own_rows, is_row, first_column, WIDTH,
            PRODUCT_STRIDE_ROW, PRODUCT_STRIDE_WIDTH, GRADIENT_STRIDE_ROW, HAS_UP, HAS_INTERLEAVED_PRODUCTS,
            HAS_INTERLEAVED_GRADIENTS, ACTIVATION, ACTIVATION_BACKWARD, WRITES_ACTIVATED, TILE_ROWS, half,
            PART_COLUMNS,
        )  # fmt: skip
        part += _finish_parts(
            right, share, gate_rows, up_rows, gate_grad, up_grad, activated, own_rows, is_row, first_column + half,
            WIDTH, PRODUCT_STRIDE_ROW, PRODUCT_STRIDE_WIDTH, GRADIENT_STRIDE_ROW, HAS_UP, HAS_INTERLEAVED_PRODUCTS,
            HAS_INTERLEAVED_GRADIENTS, ACTIVATION, ACTIVATION_BACKWARD, WRITES_ACTIVATED, TILE_ROWS, half,
            PART_COLUMNS,
        )  # fmt: skip
    return part


@triton.jit(do_not_specialize=["first_row", "last_row", "num_assignments"])
def _down_backward_kernel(
    grad,
    weight,
    order,
    offsets,
    down,
    down_block,
    down_bias,
    narrow,
    factor,
    gate_rows,
    up_rows,
    gate_grad,
    up_grad,
    activated,
    weight_parts,
    first_row,
    last_row,
    num_assignments,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_HIDDEN: tl.constexpr,
    STRIDE_WIDTH: tl.constexpr,
    BIAS_STRIDE_EXPERT: tl.constexpr,
    BIAS_STRIDE_HIDDEN: tl.constexpr,
    PRODUCT_STRIDE_ROW: tl.constexpr,
    PRODUCT_STRIDE_WIDTH: tl.constexpr,
    GRADIENT_STRIDE_ROW: tl.constexpr,
    RANK: tl.constexpr,
    TERM_STRIDE_EXPERT: tl.constexpr,
    TERM_STRIDE_COLUMN: tl.constexpr,
    TERM_STRIDE_RANK: tl.constexpr,
    HAS_TERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_INTERLEAVED_PRODUCTS: tl.constexpr,
    HAS_INTERLEAVED_GRADIENTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACTIVATION_BACKWARD: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WRITES_ACTIVATED: tl.constexpr,
    PRECISION: tl.constexpr,
    LIST_TYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    DOWN_LOAD: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
    PART_COLUMNS: tl.constexpr,
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
    assignments = tl.load(order + rows, mask=is_row, other=0)
    token_places = grad + (assignments // TOP_K).to(tl.int64)[:, None] * HIDDEN
    first_column = column_tile * TILE_COLUMNS
    down = of_expert(down, expert, LIST_TYPE, IS_ALIGNED)
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for begin in range(0, HIDDEN, TILE_DEPTH):
        left = load_rows(token_places, begin, HIDDEN, TILE_DEPTH)
        right = load_table(
            down, down_block, expert, first_column, begin, WIDTH, HIDDEN, STRIDE_EXPERT, STRIDE_WIDTH, STRIDE_HIDDEN,
            DOWN_LOAD, BY_DESCRIPTOR, TILE_COLUMNS, TILE_DEPTH,
        )  # fmt: skip
        total = tl.dot(left, right.to(left.dtype), total, input_precision=PRECISION)
    if HAS_TERM:
        total = add_term(
            total, narrow, factor, rows - first_row, is_row, expert, first_column, WIDTH, RANK, TERM_STRIDE_EXPERT,
            TERM_STRIDE_COLUMN, TERM_STRIDE_RANK, PRECISION, TILE_COLUMNS, TILE_RANK,
        )  # fmt: skip
    share = 1.0
    if HAS_WEIGHT:
        share = tl.load(weight + assignments, mask=is_row, other=0).to(tl.float32)[:, None]
    part = _finish_parts(
        total, share, gate_rows, up_rows, gate_grad, up_grad, activated, rows - first_row, is_row, first_column, WIDTH,
        PRODUCT_STRIDE_ROW, PRODUCT_STRIDE_WIDTH, GRADIENT_STRIDE_ROW, HAS_UP, HAS_INTERLEAVED_PRODUCTS,
        HAS_INTERLEAVED_GRADIENTS, ACTIVATION, ACTIVATION_BACKWARD, WRITES_ACTIVATED, TILE_ROWS, TILE_COLUMNS,
        PART_COLUMNS,
    )  # fmt: skip
    if HAS_WEIGHT:
        if HAS_BIAS:  # noqa: SIM102 - decided when it is compiled
            # Once for every row, after the loop, whose registers it does not take; a few columns at a time, since more
            # would not stay in registers beside what the loop leaves.
            if column_tile == 0:
                for begin in tl.range(0, HIDDEN, 16, num_stages=1):
                    places = begin + tl.arange(0, 16)
                    places_of_bias = down_bias + expert * BIAS_STRIDE_EXPERT + places * BIAS_STRIDE_HIDDEN
                    bias = tl.load(places_of_bias, mask=places < HIDDEN, other=0).to(tl.float32)
                    part += tl.sum(load_rows(token_places, begin, HIDDEN, 16).to(tl.float32) * bias[None, :], 1)
        parts = weight_parts + tl.cast(column_tile, tl.int64) * num_assignments
        tl.store(parts + assignments, part, mask=is_row)


_PART_COLUMNS = 32
"""Of a tile that its epilogue takes at once; half where tiles are wide or have biases, which take registers too."""
_WIDE_COLUMNS = 256


def num_weight_parts(width: int, tiles: Tiles) -> int:
    """Return the number of parts in which the routing weight's gradient comes: the tiles of columns."""
    return ceil_div(width, tiles.columns)


def down_backward(
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    routing: Routing,
    tables: Tables,
    window: Window,
    activation: Activation,
    products: tuple[torch.Tensor, torch.Tensor],
    gradients: tuple[torch.Tensor, torch.Tensor],
    activated: torch.Tensor | None,
    weight_parts: torch.Tensor | None,
    tiles: Tiles,
    precision: str,
    term: Term | None = None,
) -> None:
    """Write a window's gradients of gate's and up's products, and where asked its activated rows and weight parts.

    Args:
        grad: [T,H] of the output, contiguous, in the rows' dtype.
        weight: [N] by assignment, or None for ones.
        products: gate's and up's with their biases, [R,F] each, of the same strides, or every other column of one
            [R,2F]; without an up projection the second is not read.
        gradients: where the gradients of gate's and up's products go, [R,F] each, columns side by side, or every other
            one likewise; may be `products` again.
        activated: where act(g, u) * weight goes, [R,F], or None.
        weight_parts: [num_weight_parts,N] fp32, zeros; given where `weight` is given.
        precision: of products of fp32, "ieee" or "tf32".
        term: the low-rank term that is added to grad @ down, or None.
    """
    forward, backward = constants_of(activation)
    down_block = table_by_descriptor(tables.down.mT, tiles)
    is_full = tiles.columns >= _WIDE_COLUMNS or tables.down_bias is not None
    constants = {
        "HIDDEN": tables.hidden,
        "WIDTH": tables.width,
        "TOP_K": routing.top_k,
        "NUM_EXPERTS": tables.num_experts,
        "EXPERTS_BLOCK": triton.next_power_of_2(tables.num_experts),
        "STRIDE_EXPERT": tables.down.stride(0),
        "STRIDE_HIDDEN": tables.down.stride(1),
        "STRIDE_WIDTH": tables.down.stride(2),
        "BIAS_STRIDE_EXPERT": 0 if tables.down_bias is None else tables.down_bias.stride(0),
        "BIAS_STRIDE_HIDDEN": 0 if tables.down_bias is None else tables.down_bias.stride(1),
        "PRODUCT_STRIDE_ROW": products[0].stride(0),
        "PRODUCT_STRIDE_WIDTH": products[0].stride(1),
        "GRADIENT_STRIDE_ROW": gradients[0].stride(0),
        **constants_of_term(term),
        "HAS_BIAS": tables.down_bias is not None,
        "HAS_UP": has_up(activation),
        "HAS_INTERLEAVED_PRODUCTS": are_interleaved(products),
        "HAS_INTERLEAVED_GRADIENTS": are_interleaved(gradients),
        "ACTIVATION": forward,
        "ACTIVATION_BACKWARD": backward,
        "HAS_WEIGHT": weight is not None,
        "WRITES_ACTIVATED": activated is not None,
        "PRECISION": precision,
        **list_constants([tables.down]),
        "DOWN_LOAD": loader_of(tables.down.mT),
        "BY_DESCRIPTOR": down_block is not None,
        "PART_COLUMNS": _PART_COLUMNS // (1 + is_full),
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "TILE_DEPTH": tiles.depth,
        "GROUP_ROWS": tiles.group_rows,
    }
    arguments = {
        "grad": grad,
        "weight": grad if weight is None else weight,
        "order": routing.order,
        "offsets": routing.offsets,
        "down": argument_of(tables.down),
        "down_block": down_block,
        "down_bias": grad if tables.down_bias is None else tables.down_bias,
        "narrow": grad if term is None else term.rows,
        "factor": grad if term is None else term.matrix,
        "gate_rows": products[0],
        "up_rows": products[1],
        "gate_grad": gradients[0],
        "up_grad": gradients[1],
        "activated": grad if activated is None else activated,
        "weight_parts": grad if weight_parts is None else weight_parts,
        "first_row": window.first,
        "last_row": window.last,
        "num_assignments": routing.num_rows,
    }
    num_tiles = most_tiles(window.num_rows, tables.num_experts, tiles.rows)
    grid = (num_weight_parts(tables.width, tiles), num_tiles)
    launch(_down_backward_kernel, grid, arguments, constants, tiles)


def reference_down_backward(
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    routing: Routing,
    tables: Tables,
    window: Window,
    activation: ActivationName,
    products: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (gate's gradient, up's, activated, [N] gradient of the routing weight), in plain torch by autograd."""
    gate_rows, up_rows = (product.detach().float().requires_grad_() for product in products)
    shares = grad.new_ones(routing.num_rows) if weight is None else weight.detach().clone()
    shares.requires_grad_()
    with torch.enable_grad():
        total = gate_rows.new_zeros(())
        activated = torch.zeros_like(gate_rows)
        for expert, (start, stop) in enumerate(routing.ranges(window)):
            assignments = routing.order[start:stop].long()
            here = slice(start - window.first, stop - window.first)
            result = reference_activation(gate_rows[here], up_rows[here], activation)
            rows = (result * shares[assignments, None]).float()
            activated[here] = rows.detach()
            outputs = rows @ standing(tables.down)[expert].float().T
            if tables.down_bias is not None:
                outputs = outputs + tables.down_bias[expert].float() * shares[assignments, None]
            total = total + (outputs * grad[assignments // routing.top_k].float()).sum()
        gradients = torch.autograd.grad(total, [gate_rows, up_rows, shares], allow_unused=True, materialize_grads=True)
    return gradients[0].to(grad.dtype), gradients[1].to(grad.dtype), activated.to(grad.dtype), gradients[2]


def down_backward_accesses(launch: Launch, load: Load) -> list[Access]:
    """Return the loads and stores of one launch of the backward kernel of the down projection."""
    constants, rows, present = launch.constants, load.num_rows, load.num_present
    hidden, width, num_columns = constants["HIDDEN"], constants["WIDTH"], launch.grid[0]
    tiles, tile_rows = load.num_tiles(constants["TILE_ROWS"]), constants["TILE_ROWS"]
    names = ("gate", "up") if constants["HAS_UP"] else ("gate",)
    has_bias_part = constants["HAS_BIAS"] and constants["HAS_WEIGHT"]
    num_sweeps = num_columns + has_bias_part  # of the gradient's rows
    accesses = [
        of_tiles(launch),
        Access("order", rows * num_columns, rows),
        Access("grad", tiles * tile_rows * hidden * num_sweeps, load.num_tokens_read(tile_rows) * hidden),
        Access("down", tiles * hidden * width, present * hidden * width),
    ]
    accesses += [Access(f"{name}_rows", rows * width, rows * width) for name in names]
    accesses += [Access(f"{name}_grad", rows * width, rows * width, "store") for name in names]
    if has_bias_part:
        accesses.append(Access("down_bias", tiles * hidden, present * hidden))
    if constants["HAS_WEIGHT"]:
        accesses.append(Access("weight", rows * num_columns, rows))
        accesses.append(Access("weight_parts", rows * num_columns, rows * num_columns, "store"))
    if constants["WRITES_ACTIVATED"]:
        accesses.append(Access("activated", rows * width, rows * width, "store"))
    return [*accesses, *term_accesses(launch, load, [("narrow", "factor")], width)]
