"""Gathered tokens times gate and up, activation and routing weight: [T,H] -> [R,F] of one window, no rows gathered.

Before:  x = hidden[order // K]; g = x @ gate[e].T + gate_bias[e]; u = x @ up[e].T + up_bias[e]
         activated = act(g, u) * weight[order]
After:   one kernel; g and u are written where they are saved for backward, or where backward recomputes them.
         Arguments in the place of absent biases or an absent up are not read. Low-rank terms of gate and up are added
         to g and u.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.activation import activate, constants_of, reference_activation
from memfine_fx.kernels.blocks import all_or_none, load_rows, load_table, table_by_descriptor
from memfine_fx.kernels.computed_tables import argument_of, list_constants, loader_of, of_expert
from memfine_fx.kernels.launches import Launch, Tiles, launch
from memfine_fx.kernels.low_rank import add_term, constants_of_term, term_accesses
from memfine_fx.kernels.pairs import are_interleaved, halved, split_pair, store_pair
from memfine_fx.kernels.sorting import Routing
from memfine_fx.kernels.tables import Activation, ActivationName, Tables, Terms, has_up, standing
from memfine_fx.kernels.tile_search import find_tile, place_of
from memfine_fx.kernels.traffic import Access, Load, of_tiles
from memfine_fx.kernels.windows import Window, ceil_div, most_tiles

__all__ = ["gate_up", "gate_up_accesses", "reference_gate_up"]


@triton.jit
def _finish(
    gate_total, up_total, weight, gate_bias, up_bias, gate_rows, up_rows, activated, assignments, own_rows, is_row,
    expert, first_column, WIDTH: tl.constexpr, BIAS_STRIDE_EXPERT: tl.constexpr, BIAS_STRIDE_WIDTH: tl.constexpr,
    PRODUCT_STRIDE_ROW: tl.constexpr, PRODUCT_STRIDE_WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_UP: tl.constexpr,
    HAS_INTERLEAVED_PRODUCTS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    WRITES_PRODUCTS: tl.constexpr, WRITES_ACTIVATED: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write what follows from tiles of both products."""
    columns = first_column + tl.arange(0, TILE_COLUMNS)
    is_column = columns < WIDTH
    if HAS_BIAS:
        biases = expert * BIAS_STRIDE_EXPERT + columns * BIAS_STRIDE_WIDTH
        gate_total += tl.load(gate_bias + biases, mask=is_column, other=0).to(tl.float32)[None, :]
        if HAS_UP:
            up_total += tl.load(up_bias + biases, mask=is_column, other=0).to(tl.float32)[None, :]
    # Backward reads these in the rows' dtype; forward activates what backward will.
    gate_total = gate_total.to(activated.dtype.element_ty)
    up_total = up_total.to(activated.dtype.element_ty)
    if WRITES_PRODUCTS:
        store_pair(
            gate_rows, up_rows, gate_total, up_total, own_rows[:, None] * PRODUCT_STRIDE_ROW, first_column, is_row,
            WIDTH, PRODUCT_STRIDE_WIDTH, HAS_UP, HAS_INTERLEAVED_PRODUCTS, TILE_COLUMNS,
        )  # fmt: skip
    if WRITES_ACTIVATED:
        result = activate(gate_total.to(tl.float32), up_total.to(tl.float32), ACTIVATION)
        if HAS_WEIGHT:
            result *= tl.load(weight + assignments, mask=is_row, other=0).to(tl.float32)[:, None]
        outputs = own_rows[:, None] * WIDTH + columns[None, :]
        is_output = is_row[:, None] & is_column[None, :]
        tl.store(activated + outputs, result.to(activated.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["first_row", "last_row"])
def _gate_up_kernel(
    hidden,
    weight,
    order,
    offsets,
    gate,
    up,
    gate_block,
    up_block,
    gate_bias,
    up_bias,
    gate_narrow,
    up_narrow,
    gate_factor,
    up_factor,
    gate_rows,
    up_rows,
    activated,
    first_row,
    last_row,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr,
    STRIDE_WIDTH: tl.constexpr,
    STRIDE_HIDDEN: tl.constexpr,
    BIAS_STRIDE_EXPERT: tl.constexpr,
    BIAS_STRIDE_WIDTH: tl.constexpr,
    PRODUCT_STRIDE_ROW: tl.constexpr,
    PRODUCT_STRIDE_WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    TERM_STRIDE_EXPERT: tl.constexpr,
    TERM_STRIDE_COLUMN: tl.constexpr,
    TERM_STRIDE_RANK: tl.constexpr,
    HAS_TERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_UP: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_INTERLEAVED_PRODUCTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WRITES_PRODUCTS: tl.constexpr,
    WRITES_ACTIVATED: tl.constexpr,
    PRECISION: tl.constexpr,
    LIST_TYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    GATE_LOAD: tl.constexpr,
    UP_LOAD: tl.constexpr,
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
    assignments = tl.load(order + rows, mask=is_row, other=0)
    token_places = hidden + (assignments // TOP_K).to(tl.int64)[:, None] * HIDDEN
    first_column, own_rows = column_tile * TILE_COLUMNS, rows - first_row
    gate, up = of_expert(gate, expert, LIST_TYPE, IS_ALIGNED), of_expert(up, expert, LIST_TYPE, IS_ALIGNED)
    if IS_INTERLEAVED:  # both as one matrix: gate's columns, every other one, would be read two bytes at a time
        total = tl.zeros([TILE_ROWS, 2 * TILE_COLUMNS], tl.float32)
        for begin in range(0, HIDDEN, TILE_DEPTH):
            tokens = load_rows(token_places, begin, HIDDEN, TILE_DEPTH)
            tile = load_table(
                gate, gate_block, expert, 2 * first_column, begin, 2 * WIDTH, HIDDEN, STRIDE_EXPERT, 1, STRIDE_HIDDEN,
                "plain", BY_DESCRIPTOR, 2 * TILE_COLUMNS, TILE_DEPTH,
            )  # fmt: skip
            total = tl.dot(tokens, tile.to(tokens.dtype), total, input_precision=PRECISION)
        if HAS_TERM:
            total = add_term(
                total, gate_narrow, gate_factor, own_rows, is_row, expert, 2 * first_column, 2 * WIDTH, RANK,
                TERM_STRIDE_EXPERT, TERM_STRIDE_COLUMN, TERM_STRIDE_RANK, PRECISION, 2 * TILE_COLUMNS, TILE_RANK,
            )  # fmt: skip
    else:
        gate_total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        up_total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        for begin in range(0, HIDDEN, TILE_DEPTH):
            tokens = load_rows(token_places, begin, HIDDEN, TILE_DEPTH)
            gate_tile = load_table(
                gate, gate_block, expert, first_column, begin, WIDTH, HIDDEN, STRIDE_EXPERT, STRIDE_WIDTH,
                STRIDE_HIDDEN, GATE_LOAD, BY_DESCRIPTOR, TILE_COLUMNS, TILE_DEPTH,
            )  # fmt: skip
            gate_total = tl.dot(tokens, gate_tile.to(tokens.dtype), gate_total, input_precision=PRECISION)
            if HAS_UP:
                up_tile = load_table(
                    up, up_block, expert, first_column, begin, WIDTH, HIDDEN, STRIDE_EXPERT, STRIDE_WIDTH,
                    STRIDE_HIDDEN, UP_LOAD, BY_DESCRIPTOR, TILE_COLUMNS, TILE_DEPTH,
                )  # fmt: skip
                up_total = tl.dot(tokens, up_tile.to(tokens.dtype), up_total, input_precision=PRECISION)
        if HAS_TERM:
            gate_total = add_term(
                gate_total, gate_narrow, gate_factor, own_rows, is_row, expert, first_column, WIDTH, RANK,
                TERM_STRIDE_EXPERT, TERM_STRIDE_COLUMN, TERM_STRIDE_RANK, PRECISION, TILE_COLUMNS, TILE_RANK,
            )  # fmt: skip
            if HAS_UP:
                up_total = add_term(
                    up_total, up_narrow, up_factor, own_rows, is_row, expert, first_column, WIDTH, RANK,
                    TERM_STRIDE_EXPERT, TERM_STRIDE_COLUMN, TERM_STRIDE_RANK, PRECISION, TILE_COLUMNS, TILE_RANK,
                )  # fmt: skip
    if TILE_COLUMNS >= 128:  # one half after the other, so that registers hold what half a tile takes
        half: tl.constexpr = TILE_COLUMNS // 2
        if IS_INTERLEAVED:
            first, second = halved(total, TILE_ROWS, 2 * TILE_COLUMNS)
            gate_total, up_total = split_pair(first, TILE_ROWS, half)
            gate_second, up_second = split_pair(second, TILE_ROWS, half)
        else:
            gate_total, gate_second = halved(gate_total, TILE_ROWS, TILE_COLUMNS)
            up_total, up_second = halved(up_total, TILE_ROWS, TILE_COLUMNS)
        _finish(
            gate_total, up_total, weight, gate_bias, up_bias, gate_rows, up_rows, activated, assignments, own_rows,
            is_row, expert, first_column, WIDTH, BIAS_STRIDE_EXPERT, BIAS_STRIDE_WIDTH, PRODUCT_STRIDE_ROW,
            PRODUCT_STRIDE_WIDTH, HAS_BIAS, HAS_UP, HAS_INTERLEAVED_PRODUCTS, ACTIVATION, HAS_WEIGHT, WRITES_PRODUCTS,
            WRITES_ACTIVATED, half,
        )  # fmt: skip
        _finish(
            gate_second, up_second, weight, gate_bias, up_bias, gate_rows, up_rows, activated, assignments, own_rows,
            is_row, expert, first_column + half, WIDTH, BIAS_STRIDE_EXPERT, BIAS_STRIDE_WIDTH, PRODUCT_STRIDE_ROW,
            PRODUCT_STRIDE_WIDTH, HAS_BIAS, HAS_UP, HAS_INTERLEAVED_PRODUCTS, ACTIVATION, HAS_WEIGHT, WRITES_PRODUCTS,
            WRITES_ACTIVATED, half,
        )  # fmt: skip
    else:
        if IS_INTERLEAVED:
            gate_total, up_total = split_pair(total, TILE_ROWS, TILE_COLUMNS)
        _finish(
            gate_total, up_total, weight, gate_bias, up_bias, gate_rows, up_rows, activated, assignments, own_rows,
            is_row, expert, first_column, WIDTH, BIAS_STRIDE_EXPERT, BIAS_STRIDE_WIDTH, PRODUCT_STRIDE_ROW,
            PRODUCT_STRIDE_WIDTH, HAS_BIAS, HAS_UP, HAS_INTERLEAVED_PRODUCTS, ACTIVATION, HAS_WEIGHT, WRITES_PRODUCTS,
            WRITES_ACTIVATED, TILE_COLUMNS,
        )  # fmt: skip


def gate_up(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    routing: Routing,
    tables: Tables,
    window: Window,
    activation: Activation,
    products: tuple[torch.Tensor, torch.Tensor] | None,
    activated: torch.Tensor | None,
    tiles: Tiles,
    precision: str,
    terms: Terms | None = None,
) -> None:
    """Write a window's products, its activated rows, or both.

    Args:
        hidden: [T,H], contiguous.
        weight: [N] by assignment, or None for ones.
        products: where gate's and up's go, with their biases; [R,F] each, of the same strides, or every other column
            of one [R,2F]. Without an up projection the second is not written.
        activated: where act(g, u) * weight goes, [R,F], contiguous.
        precision: of products of fp32, "ieee" or "tf32".
        terms: low-rank terms that are added to gate's and up's products, or None.
    """
    is_interleaved = are_interleaved((tables.gate, tables.up))
    if is_interleaved:
        gate_block = up_block = table_by_descriptor(tables.projections[0], tiles, 2 * tiles.columns)
    else:
        gate_block, up_block = all_or_none([table_by_descriptor(table, tiles) for table in (tables.gate, tables.up)])
    gate_term = up_term = None
    if terms is not None:
        gate_term, up_term = (terms.projections[0],) * 2 if is_interleaved else (terms.gate, terms.up)
    constants = {
        "HIDDEN": tables.hidden,
        "WIDTH": tables.width,
        "TOP_K": routing.top_k,
        "NUM_EXPERTS": tables.num_experts,
        "EXPERTS_BLOCK": triton.next_power_of_2(tables.num_experts),
        "STRIDE_EXPERT": tables.gate.stride(0),
        "STRIDE_WIDTH": tables.gate.stride(1),
        "STRIDE_HIDDEN": tables.gate.stride(2),
        "BIAS_STRIDE_EXPERT": 0 if tables.gate_bias is None else tables.gate_bias.stride(0),
        "BIAS_STRIDE_WIDTH": 0 if tables.gate_bias is None else tables.gate_bias.stride(1),
        "PRODUCT_STRIDE_ROW": 0 if products is None else products[0].stride(0),
        "PRODUCT_STRIDE_WIDTH": 0 if products is None else products[0].stride(1),
        **constants_of_term(gate_term),
        "HAS_BIAS": tables.gate_bias is not None,
        "HAS_UP": has_up(activation),
        "IS_INTERLEAVED": is_interleaved,
        "HAS_INTERLEAVED_PRODUCTS": products is not None and are_interleaved(products),
        "ACTIVATION": constants_of(activation)[0],
        "HAS_WEIGHT": weight is not None,
        "WRITES_PRODUCTS": products is not None,
        "WRITES_ACTIVATED": activated is not None,
        "PRECISION": precision,
        **list_constants([tables.gate, tables.up]),
        "GATE_LOAD": loader_of(tables.gate),
        "UP_LOAD": loader_of(tables.up),
        "BY_DESCRIPTOR": gate_block is not None,
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "TILE_DEPTH": tiles.depth,
        "GROUP_ROWS": tiles.group_rows,
    }
    gate_rows, up_rows = (hidden, hidden) if products is None else products
    arguments = {
        "hidden": hidden,
        "weight": hidden if weight is None else weight,
        "order": routing.order,
        "offsets": routing.offsets,
        "gate": argument_of(tables.gate),
        "up": argument_of(tables.up),
        "gate_block": gate_block,
        "up_block": up_block,
        "gate_bias": hidden if tables.gate_bias is None else tables.gate_bias,
        "up_bias": hidden if tables.up_bias is None else tables.up_bias,
        "gate_narrow": hidden if gate_term is None else gate_term.rows,
        "up_narrow": hidden if up_term is None else up_term.rows,
        "gate_factor": hidden if gate_term is None else gate_term.matrix,
        "up_factor": hidden if up_term is None else up_term.matrix,
        "gate_rows": gate_rows,
        "up_rows": up_rows,
        "activated": hidden if activated is None else activated,
        "first_row": window.first,
        "last_row": window.last,
    }
    num_tiles = most_tiles(window.num_rows, tables.num_experts, tiles.rows)
    launch(_gate_up_kernel, (ceil_div(tables.width, tiles.columns), num_tiles), arguments, constants, tiles)


def reference_gate_up(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    routing: Routing,
    tables: Tables,
    window: Window,
    activation: ActivationName,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (gate's products, up's, activated) of a window in plain torch, zeros in rows of no expert."""
    gate_rows, up_rows, activated = hidden.new_zeros((3, window.num_rows, tables.width)).unbind()
    for expert, (start, stop) in enumerate(routing.ranges(window)):
        assignments = routing.order[start:stop].long()
        here = slice(start - window.first, stop - window.first)
        rows = hidden[assignments // routing.top_k]
        gate_rows[here] = rows @ standing(tables.gate)[expert].T.to(hidden.dtype)
        up_rows[here] = rows @ standing(tables.up)[expert].T.to(hidden.dtype)
        if tables.gate_bias is not None and tables.up_bias is not None:
            gate_rows[here] += tables.gate_bias[expert].to(hidden.dtype)
            up_rows[here] += tables.up_bias[expert].to(hidden.dtype)
        result = reference_activation(gate_rows[here].float(), up_rows[here].float(), activation)
        activated[here] = (result if weight is None else result * weight[assignments, None]).to(hidden.dtype)
    return gate_rows, up_rows, activated


def gate_up_accesses(launch: Launch, load: Load) -> list[Access]:
    """Return the loads and stores of one launch of the gate and up kernel."""
    constants, rows, present = launch.constants, load.num_rows, load.num_present
    hidden, width, num_columns = constants["HIDDEN"], constants["WIDTH"], launch.grid[0]
    tiles, tile_rows = load.num_tiles(constants["TILE_ROWS"]), constants["TILE_ROWS"]
    names = ("gate", "up") if constants["HAS_UP"] else ("gate",)
    accesses = [
        of_tiles(launch),
        Access("order", rows * num_columns, rows),
        Access("hidden", tiles * tile_rows * hidden * num_columns, load.num_tokens_read(tile_rows) * hidden),
        *(Access(name, tiles * hidden * width, present * hidden * width) for name in names),
    ]
    if constants["WRITES_PRODUCTS"]:
        accesses += [Access(f"{name}_rows", rows * width, rows * width, "store") for name in names]
    if constants["WRITES_ACTIVATED"]:
        accesses.append(Access("activated", rows * width, rows * width, "store"))
        if constants["HAS_WEIGHT"]:
            accesses.append(Access("weight", rows * num_columns, rows))
    if constants["HAS_BIAS"]:
        accesses += [Access(f"{name}_bias", tiles * width, present * width) for name in names]
    if constants["IS_INTERLEAVED"]:
        return [*accesses, *term_accesses(launch, load, [("gate_narrow", "gate_factor")], 2 * width)]
    return [*accesses, *term_accesses(launch, load, [(f"{name}_narrow", f"{name}_factor") for name in names], width)]
