"""Gradients of the experts' matrices and biases, straight into their tables, for all matrices in one launch.

Of an expert in a window, over its rows r and their tokens t, with weight w of the assignment:
    gate, up     sum of gate'[r] x hidden[t], up'[r] x hidden[t]      their biases  sum of gate'[r], up'[r]
    down         sum of activated[r] x grad[t], as [F,H]              its bias      sum of w[r] grad[t]
Where one parameter holds gate and up, they are one matrix here, of 2F outputs in that parameter's order.

Gradients may be added in place to existing ones.

An expert that a window's border cuts is finished by the window that has its last row. Until then its sums stay in fp32,
in one of two stages: at every border at most one expert is cut, so a window reads what the one before left in one
stage and leaves what is cut at its own end in the other. An expert without rows gets zeros from the first window.
Biases are small: their sums of all experts stay in fp32 from the first window to the last.
The same kernel makes gradients of adapters' factors, of which some have rows of the window in the tokens' place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.blocks import all_or_none, by_descriptor
from memfine_fx.kernels.computed_tables import argument_of, list_constants, of_expert
from memfine_fx.kernels.launches import Launch, Tiles, launch
from memfine_fx.kernels.pairs import halved
from memfine_fx.kernels.sorting import Routing
from memfine_fx.kernels.tables import Table, Tables, standing
from memfine_fx.kernels.tile_search import places_of
from memfine_fx.kernels.traffic import Access, Load
from memfine_fx.kernels.windows import Window, ceil_div

__all__ = ["TableGradients", "reference_weight_gradient", "weight_gradient", "weight_gradient_accesses"]


@triton.jit
def _finish(
    total, table, found, left_over, expert, heights, first_column, is_continued, is_cut, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE_EXPERT: tl.constexpr, STRIDE_HEIGHT: tl.constexpr, STRIDE_WIDTH: tl.constexpr,
    IS_ADDED: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add what earlier windows found, and write or add to the table or, for a later window, write to the stage."""
    columns = first_column + tl.arange(0, TILE_COLUMNS)
    is_entry = (heights < HEIGHT)[:, None] & (columns < WIDTH)[None, :]
    places = heights[:, None] * WIDTH + columns[None, :]
    if is_continued:
        total += tl.load(found + places, mask=is_entry, other=0)
    if is_cut:
        tl.store(left_over + places, total, mask=is_entry)
    else:
        entries = expert.to(tl.int64) * STRIDE_EXPERT + heights[:, None].to(tl.int64) * STRIDE_HEIGHT
        entries += columns[None, :].to(tl.int64) * STRIDE_WIDTH
        if IS_ADDED:
            total += tl.load(table + entries, mask=is_entry, other=0).to(tl.float32)
        tl.store(table + entries, total.to(table.dtype.element_ty), mask=is_entry)


@triton.jit
def _load_step(
    left_rows, left_block, tokens, order, start, end, first_row, first_height, first_column, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, IS_FULL: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """Load [DEPTH,ROWS] of the window's rows from `start` and [DEPTH,COLUMNS] of their tokens; zeros from `end` on.

    With a K of 0 the tokens are rows of the window too. A full step has no rows from `end` on, and no mask for them.
    Only such a step takes rows by descriptor: behind the last expert's stand rows that nobody wrote, and zeros times
    what is no number is no number.
    """
    heights, columns = first_height + tl.arange(0, TILE_ROWS), first_column + tl.arange(0, TILE_COLUMNS)
    rows = start + tl.arange(0, TILE_DEPTH)
    is_row = rows < end
    if IS_FULL:
        token = places_of(order, rows, None, first_row, TOP_K)
    else:
        token = places_of(order, rows, is_row, first_row, TOP_K)
    token_places = tokens + token[:, None] * WIDTH + columns[None, :]
    left_places = left_rows + (rows - first_row)[:, None] * HEIGHT + heights[None, :]
    if not IS_FULL:
        gathered = tl.load(token_places, mask=is_row[:, None] & (columns < WIDTH)[None, :], other=0)
        left = tl.load(left_places, mask=is_row[:, None] & (heights < HEIGHT)[None, :], other=0)
    else:
        if WIDTH % TILE_COLUMNS == 0:
            gathered = tl.load(token_places)
        else:
            gathered = tl.load(token_places, mask=(columns < WIDTH)[None, :], other=0)
        if BY_DESCRIPTOR:
            left = left_block.load([start - first_row, first_height])
        elif HEIGHT % TILE_ROWS == 0:
            left = tl.load(left_places)
        else:
            left = tl.load(left_places, mask=(heights < HEIGHT)[None, :], other=0)
    return left, gathered


@triton.jit
def _matrix_tile(
    left_rows, left_block, tokens, weight, order, table, found, left_over, sums, expert, begin, end, first_row, tile,
    is_continued, is_cut, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, STRIDE_EXPERT: tl.constexpr,
    STRIDE_HEIGHT: tl.constexpr, STRIDE_WIDTH: tl.constexpr, BIAS_STRIDE_EXPERT: tl.constexpr,
    BIAS_STRIDE: tl.constexpr, BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, IS_ADDED: tl.constexpr,
    PRECISION: tl.constexpr, LIST_TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the sum of left_rows[r] x tokens[order[r] // K] over an expert's rows, [HEIGHT,WIDTH].

    A bias goes with what is on the left, or with the tokens, times the rows' weight.
    """
    num_columns: tl.constexpr = tl.cdiv(WIDTH, TILE_COLUMNS)
    row_tile, column_tile = tile // num_columns, tile % num_columns
    heights = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_height, is_column = heights < HEIGHT, columns < WIDTH
    table = of_expert(table, expert, LIST_TYPE, IS_ALIGNED)
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    first_height, first_column = row_tile * TILE_ROWS, column_tile * TILE_COLUMNS
    middle = begin + tl.maximum(end - begin, 0) // TILE_DEPTH * TILE_DEPTH
    for start in range(begin, middle, TILE_DEPTH):
        left, gathered = _load_step(
            left_rows, left_block, tokens, order, start, end, first_row, first_height, first_column, HEIGHT, WIDTH,
            TOP_K, True, BY_DESCRIPTOR, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH,
        )  # fmt: skip
        total = tl.dot(tl.trans(left), gathered, total, input_precision=PRECISION)
    if middle < end:
        left, gathered = _load_step(
            left_rows, left_block, tokens, order, middle, end, first_row, first_height, first_column, HEIGHT, WIDTH,
            TOP_K, False, BY_DESCRIPTOR, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH,
        )  # fmt: skip
        total = tl.dot(tl.trans(left), gathered, total, input_precision=PRECISION)
    if TILE_COLUMNS >= 128:  # one half after the other, so that registers hold what half a tile takes
        half: tl.constexpr = TILE_COLUMNS // 2
        first, second = halved(total, TILE_ROWS, TILE_COLUMNS)
        _finish(
            first, table, found, left_over, expert, heights, first_column, is_continued, is_cut, HEIGHT, WIDTH,
            STRIDE_EXPERT, STRIDE_HEIGHT, STRIDE_WIDTH, IS_ADDED, half,
        )  # fmt: skip
        _finish(
            second, table, found, left_over, expert, heights, first_column + half, is_continued, is_cut, HEIGHT, WIDTH,
            STRIDE_EXPERT, STRIDE_HEIGHT, STRIDE_WIDTH, IS_ADDED, half,
        )  # fmt: skip
    else:
        _finish(
            total, table, found, left_over, expert, heights, first_column, is_continued, is_cut, HEIGHT, WIDTH,
            STRIDE_EXPERT, STRIDE_HEIGHT, STRIDE_WIDTH, IS_ADDED, TILE_COLUMNS,
        )  # fmt: skip
    # A bias is summed by one row of tiles alone, in a loop of its own that reads from L2 again: beside the product
    # every tile would bring what it multiplies into registers too.
    if BIAS == "left":
        if column_tile == 0:
            sum_left = tl.zeros([TILE_ROWS], tl.float32)
            for start in range(begin, end, TILE_DEPTH):
                rows = start + tl.arange(0, TILE_DEPTH)
                places = (rows - first_row)[:, None] * HEIGHT + heights[None, :]
                left = tl.load(left_rows + places, mask=(rows < end)[:, None] & is_height[None, :], other=0)
                sum_left += tl.sum(left.to(tl.float32), 0)
            _add_to_sums(sums + expert * BIAS_STRIDE_EXPERT + heights * BIAS_STRIDE, sum_left, is_height)
    elif BIAS == "tokens":  # noqa: SIM102 - decided when it is compiled
        if row_tile == 0:
            sum_tokens = tl.zeros([TILE_COLUMNS], tl.float32)
            for start in range(begin, end, TILE_DEPTH):
                rows = start + tl.arange(0, TILE_DEPTH)
                is_row = rows < end
                assignments = tl.load(order + rows, mask=is_row, other=0)
                token = (assignments // TOP_K).to(tl.int64)
                is_gathered = is_row[:, None] & is_column[None, :]
                shared = tl.load(tokens + token[:, None] * WIDTH + columns[None, :], mask=is_gathered, other=0)
                shared = shared.to(tl.float32)
                if HAS_WEIGHT:
                    shared = shared * tl.load(weight + assignments, mask=is_row, other=0).to(tl.float32)[:, None]
                sum_tokens += tl.sum(shared, 0)
            _add_to_sums(sums + expert * BIAS_STRIDE_EXPERT + columns * BIAS_STRIDE, sum_tokens, is_column)


@triton.jit
def _add_to_sums(places, total, is_place):
    """One program alone adds to these in a launch."""
    tl.store(places, tl.load(places, mask=is_place, other=0) + total, mask=is_place)


@triton.jit(do_not_specialize=["first_row", "last_row"])
def _weight_gradient_kernel(
    first_rows, second_rows, hidden, activated, grad, weight, order, offsets,
    first_block, second_block, activated_block,
    first_table, second_table, down_table, first_found, second_found, down_found, first_left, second_left, down_left,
    first_sums, second_sums, down_sums, first_row, last_row,
    HEIGHT: tl.constexpr, DOWN_HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr, STRIDE_HEIGHT: tl.constexpr, STRIDE_WIDTH: tl.constexpr,
    DOWN_STRIDE_EXPERT: tl.constexpr, DOWN_STRIDE_HEIGHT: tl.constexpr, DOWN_STRIDE_WIDTH: tl.constexpr,
    BIAS_STRIDE_EXPERT: tl.constexpr, BIAS_STRIDE_HEIGHT: tl.constexpr,
    DOWN_BIAS_STRIDE_EXPERT: tl.constexpr, DOWN_BIAS_STRIDE_WIDTH: tl.constexpr,
    NUM_PROJECTIONS: tl.constexpr, NUM_TILES: tl.constexpr, HAS_DOWN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, FIRST_IS_ADDED: tl.constexpr, SECOND_IS_ADDED: tl.constexpr,
    DOWN_IS_ADDED: tl.constexpr, IS_FIRST_WINDOW: tl.constexpr, PRECISION: tl.constexpr, LIST_TYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    own_begin = tl.load(offsets + expert).to(tl.int32)
    own_end = tl.load(offsets + expert + 1).to(tl.int32)
    begin, end = tl.maximum(own_begin, first_row), tl.minimum(own_end, last_row)
    is_empty = IS_FIRST_WINDOW & (own_begin == own_end)
    if (begin >= end) & (is_empty == 0):
        return
    is_continued = own_begin < first_row
    is_cut = (own_end > last_row) & (begin < end)  # experts without rows stand anywhere, and are complete
    # One matrix a program: the tiles of each come one after the other.
    bias: tl.constexpr = "left" if HAS_BIAS else "none"
    tile = tl.program_id(0)
    if NUM_PROJECTIONS > 0:  # noqa: SIM102 - decided when it is compiled
        if tile < NUM_TILES:
            _matrix_tile(
                first_rows, first_block, hidden, weight, order, first_table, first_found, first_left, first_sums,
                expert, begin, end, first_row, tile, is_continued, is_cut, HEIGHT, WIDTH, TOP_K, STRIDE_EXPERT,
                STRIDE_HEIGHT, STRIDE_WIDTH, BIAS_STRIDE_EXPERT, BIAS_STRIDE_HEIGHT, bias, HAS_WEIGHT, FIRST_IS_ADDED,
                PRECISION, LIST_TYPE, IS_ALIGNED, BY_DESCRIPTOR, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH,
            )  # fmt: skip
    if NUM_PROJECTIONS > 1:  # noqa: SIM102 - decided when it is compiled
        if (tile >= NUM_TILES) & (tile < 2 * NUM_TILES):
            _matrix_tile(
                second_rows, second_block, hidden, weight, order, second_table, second_found, second_left, second_sums,
                expert, begin, end, first_row, tile - NUM_TILES, is_continued, is_cut, HEIGHT, WIDTH, TOP_K,
                STRIDE_EXPERT, STRIDE_HEIGHT, STRIDE_WIDTH, BIAS_STRIDE_EXPERT, BIAS_STRIDE_HEIGHT, bias, HAS_WEIGHT,
                SECOND_IS_ADDED, PRECISION, LIST_TYPE, IS_ALIGNED, BY_DESCRIPTOR, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH,
            )  # fmt: skip
    if HAS_DOWN:
        down_bias: tl.constexpr = "tokens" if HAS_BIAS else "none"
        if tile >= NUM_PROJECTIONS * NUM_TILES:
            _matrix_tile(
                activated, activated_block, grad, weight, order, down_table, down_found, down_left, down_sums, expert,
                begin, end, first_row, tile - NUM_PROJECTIONS * NUM_TILES, is_continued, is_cut, DOWN_HEIGHT, WIDTH,
                TOP_K, DOWN_STRIDE_EXPERT, DOWN_STRIDE_HEIGHT, DOWN_STRIDE_WIDTH, DOWN_BIAS_STRIDE_EXPERT,
                DOWN_BIAS_STRIDE_WIDTH, down_bias, HAS_WEIGHT, DOWN_IS_ADDED, PRECISION, LIST_TYPE, IS_ALIGNED,
                BY_DESCRIPTOR, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH,
            )  # fmt: skip


Stages = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TableGradients:
    """The tensors that gradients of the parameters are written to.

    Args:
        tables: views of them. Biases are fp32, zeros at first.
        stages: for each of the tables' projections and for down, two of one expert in fp32; never read before they
            are written.
        has_projections, has_down: which are written; those that are not may be anything of the same shape.
        are_added: for each of the tables' projections and for down, whether gradients are added in place to existing
            ones; where they are not, the table is never read.
    """

    tables: Tables
    stages: Sequence[Stages]
    has_projections: bool
    has_down: bool
    are_added: Sequence[bool]

    @staticmethod
    def of(
        tables: Tables,
        *,
        has_projections: bool = True,
        has_down: bool = True,
        is_cut: bool = True,
        are_added: Sequence[bool] | None = None,
    ) -> TableGradients:
        """Return the destinations of a layer's gradients, with new stages.

        Args:
            is_cut: whether a window may cut an expert; in a layer of one window there is nothing to stage.
        """

        def stages(table: Table, is_written: bool) -> Stages:
            size = table.shape[1:] if is_cut and is_written else (1,)
            beside = table if isinstance(table, torch.Tensor) else table.tensors[0]
            return beside.new_empty(size, dtype=torch.float32), beside.new_empty(size, dtype=torch.float32)

        of_projections = [stages(table, has_projections) for table in tables.projections]
        every = [*of_projections, stages(tables.down, has_down)]
        return TableGradients(tables, every, has_projections, has_down, are_added or [False] * len(every))


def weight_gradient(
    rows: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    activated: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    routing: Routing,
    window: Window,
    into: TableGradients,
    tiles: Tiles,
    precision: str,
) -> None:
    """Add a window's part of every expert to the gradients.

    Windows come in order, each once.

    Args:
        rows: gradients of the products of each of the tables' projections: [R,F], or [R,2F] of gate and up in one, as
            that table's outputs are; contiguous.
        hidden: [T,H], contiguous, gathered row by row; as `grad` is, of the output. With a K of 0 [R,H] of the window.
        activated: act(g, u) * weight, [R,F], contiguous.
        weight: [N] by assignment, or None for ones.
        into: of `TableGradients.of`, for all windows of a layer.
        precision: of products of fp32, "ieee" or "tf32".
    """
    tables, down = into.tables, into.tables.down.mT
    read_stage, left = window.number % 2, (window.number + 1) % 2
    projections, biases = tables.projections, [*tables.projection_biases, tables.down_bias]
    has_bias = tables.down_bias is not None
    height, num_projections = projections[0].shape[1], len(projections) * into.has_projections
    num_columns = ceil_div(tables.hidden, tiles.columns)
    num_tiles, num_down_tiles = (ceil_div(size, tiles.rows) * num_columns for size in (height, tables.width))
    lefts = {"first": rows[0], "second": rows[-1]} if num_projections else {}
    lefts |= {"activated": activated} if into.has_down else {}
    described = all_or_none([by_descriptor(tensor, [tiles.depth, tiles.rows], tiles) for tensor in lefts.values()])
    blocks = dict(zip(lefts, described, strict=True))
    constants = {
        "HEIGHT": height,
        "DOWN_HEIGHT": tables.width,
        "WIDTH": tables.hidden,
        "TOP_K": routing.top_k,
        **_strides("", projections[0], ("EXPERT", "HEIGHT", "WIDTH")),
        **_strides("DOWN_", down, ("EXPERT", "HEIGHT", "WIDTH")),
        **_strides("BIAS_", biases[0], ("EXPERT", "HEIGHT")),
        **_strides("DOWN_BIAS_", biases[-1], ("EXPERT", "WIDTH")),
        "NUM_PROJECTIONS": num_projections,
        "NUM_TILES": num_tiles,
        "HAS_DOWN": into.has_down,
        "HAS_BIAS": has_bias,
        "HAS_WEIGHT": has_bias and weight is not None,
        "FIRST_IS_ADDED": into.are_added[0],
        "SECOND_IS_ADDED": into.are_added[len(projections) - 1],
        "DOWN_IS_ADDED": into.are_added[-1],
        "IS_FIRST_WINDOW": window.number == 0,
        "PRECISION": precision,
        **list_constants([*projections, down]),
        "BY_DESCRIPTOR": None not in described,
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "TILE_DEPTH": tiles.depth,
    }
    arguments = {
        "first_rows": rows[0],
        "second_rows": rows[-1],
        "hidden": hidden,
        "activated": activated,
        "grad": grad,
        "weight": grad if weight is None or not has_bias else weight,
        "order": routing.order,
        "offsets": routing.offsets,
        "first_table": argument_of(projections[0]),
        "second_table": argument_of(projections[-1]),
        "down_table": argument_of(down),
        "first_row": window.first,
        "last_row": window.last,
    }
    arguments |= {f"{name}_block": blocks.get(name) for name in ("first", "second", "activated")}
    for name, place in (("first", 0), ("second", len(projections) - 1), ("down", -1)):
        sums = biases[place if has_bias else -1]
        arguments |= {f"{name}_found": into.stages[place][read_stage], f"{name}_left": into.stages[place][left]}
        arguments[f"{name}_sums"] = hidden if sums is None else sums
    grid = (num_projections * num_tiles + into.has_down * num_down_tiles, tables.num_experts)
    launch(_weight_gradient_kernel, grid, arguments, constants, tiles)


def _strides(prefix: str, table: Table | None, axes: Sequence[str]) -> dict[str, int]:
    strides = [0 if table is None else table.stride(axis) for axis in range(len(axes))]
    return {f"{prefix}STRIDE_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def reference_weight_gradient(
    rows: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    activated: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor | None,
    routing: Routing,
    window: Window,
    totals: Tables,
) -> None:
    """Add a window's part to `totals`, fp32, in plain torch."""
    for expert, (start, stop) in enumerate(routing.ranges(window)):
        assignments = routing.order[start:stop].long()
        here = slice(start - window.first, stop - window.first)
        tokens, grads = (tensor[assignments // routing.top_k].float() for tensor in (hidden, grad))
        for row_grads, table in zip(rows, totals.projections, strict=True):
            standing(table)[expert] += row_grads[here].float().T @ tokens
        standing(totals.down)[expert] += grads.T @ activated[here].float()
        if totals.down_bias is None:
            continue
        for row_grads, bias in zip(rows, totals.projection_biases, strict=True):
            bias[expert] += row_grads[here].float().sum(0)
        shares = 1.0 if weight is None else weight[assignments, None].float()
        totals.down_bias[expert] += (grads * shares).sum(0)


def weight_gradient_accesses(launch: Launch, load: Load) -> list[Access]:
    """Return the loads and stores of one launch of the weight gradient kernel."""
    constants, (num_tiles, num_experts) = launch.constants, launch.grid
    accesses = [Access("offsets", 2 * num_tiles * num_experts, num_experts + 1)]
    num_columns = ceil_div(constants["WIDTH"], constants["TILE_COLUMNS"])
    num_orders = num_tiles + (constants["HAS_DOWN"] and constants["HAS_BIAS"]) * num_columns
    if constants["TOP_K"]:
        accesses.append(Access("order", num_orders * load.num_rows, load.num_rows))
    for place, name in enumerate(("first", "second")[: constants["NUM_PROJECTIONS"]]):
        tokens, *others = _part_accesses(launch, load, "hidden", f"{name}_rows", name, constants["HEIGHT"])
        accesses += [tokens if place == 0 else replace(tokens, distinct=0), *others]  # the same tokens for both
    if constants["HAS_DOWN"]:
        accesses += _part_accesses(launch, load, "grad", "activated", "down", constants["DOWN_HEIGHT"])
        if constants["HAS_BIAS"] and constants["HAS_WEIGHT"]:
            accesses.append(Access("weight", num_columns * load.num_rows, load.num_rows))
    return accesses


def _part_accesses(launch: Launch, load: Load, tokens: str, left: str, table: str, height: int) -> list[Access]:
    """Return the loads and stores that the gradient of one matrix of every expert takes."""
    constants, rows = launch.constants, load.num_rows
    width = constants["WIDTH"]
    num_heights, num_widths = ceil_div(height, constants["TILE_ROWS"]), ceil_div(width, constants["TILE_COLUMNS"])
    num_run = load.num_present + constants["IS_FIRST_WINDOW"] * load.num_empty
    num_tokens = load.num_tokens if constants["TOP_K"] else rows
    size = height * width
    num_written = (num_run - load.is_cut) * size
    has_bias, is_down = constants["HAS_BIAS"], table == "down"
    accesses = [  # with what sums of a bias read again
        Access(tokens, (num_heights + (has_bias and is_down)) * rows * width, num_tokens * width),
        Access(left, (num_widths + (has_bias and not is_down)) * rows * height, rows * height),
        Access(f"{table}_table", num_written, num_written, "store"),
    ]
    if constants[f"{table.upper()}_IS_ADDED"]:
        accesses.append(Access(f"{table}_table", num_written, num_written))
    if load.is_continued:
        accesses.append(Access(f"{table}_found", size, size))
    if load.is_cut:
        accesses.append(Access(f"{table}_left", size, size, "store"))
    if has_bias:
        num_sums = num_run * (width if is_down else height)
        accesses += [Access(f"{table}_sums", num_sums, num_sums), Access(f"{table}_sums", num_sums, num_sums, "store")]
    return accesses
