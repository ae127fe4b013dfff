"""Gradients of the experts' matrices and biases, straight into their tables, for all three matrices in one launch.

Of an expert in a window, over its rows r and their tokens t, with weight w of the assignment:
    gate, up     sum of gate'[r] x hidden[t], up'[r] x hidden[t]      their biases  sum of gate'[r], up'[r]
    down         sum of activated[r] x grad[t], as [F,H]              its bias      sum of w[r] grad[t]

An expert that a window's border cuts is finished by the window that has its last row. Until then its sums stay in fp32,
in one of two stages: at every border at most one expert is cut, so a window reads what the one before left in one
stage and leaves what is cut at its own end in the other. An expert without rows gets zeros from the first window.
Biases are small: their sums of all experts stay in fp32 from the first window to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from memfine_fx.runtime.kernels.launches import Launch, Tiles, launch
from memfine_fx.runtime.kernels.sorting import Routing
from memfine_fx.runtime.kernels.tables import Tables
from memfine_fx.runtime.kernels.traffic import Access, Load
from memfine_fx.runtime.kernels.windows import Window, ceil_div

__all__ = ["TableGradients", "reference_weight_gradient", "weight_gradient", "weight_gradient_accesses"]


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


@triton.jit
def _add_to_sums(sums, place, total, is_place):
    """One program alone adds to these in a launch."""
    tl.store(sums + place, tl.load(sums + place, mask=is_place, other=0) + total, mask=is_place)


@triton.jit
def _projections_tile(
    gate_grad, up_grad, hidden, order, gate_table, up_table, gate_found, up_found, gate_left, up_left, gate_sums,
    up_sums, expert, begin, end, first_row, heights, columns, is_continued, is_cut, is_first_column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, STRIDE_EXPERT: tl.constexpr,
    STRIDE_HEIGHT: tl.constexpr, STRIDE_WIDTH: tl.constexpr, BIAS_STRIDE_EXPERT: tl.constexpr,
    BIAS_STRIDE_HEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_UP: tl.constexpr, PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    is_height, is_column = heights < HEIGHT, columns < WIDTH
    gate_total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    up_total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    gate_sum = tl.zeros([TILE_ROWS], tl.float32)
    up_sum = tl.zeros([TILE_ROWS], tl.float32)
    for start in range(begin, end, TILE_DEPTH):
        rows = start + tl.arange(0, TILE_DEPTH)
        is_row = rows < end
        token = (tl.load(order + rows, mask=is_row, other=0) // TOP_K).to(tl.int64)
        is_gathered = is_row[:, None] & is_column[None, :]
        gathered = tl.load(hidden + token[:, None] * WIDTH + columns[None, :], mask=is_gathered, other=0)
        places = (rows - first_row)[:, None] * HEIGHT + heights[None, :]
        is_left = is_row[:, None] & is_height[None, :]
        left = tl.load(gate_grad + places, mask=is_left, other=0)
        gate_total = tl.dot(tl.trans(left), gathered, gate_total, input_precision=PRECISION)
        if HAS_BIAS:
            gate_sum += tl.sum(left.to(tl.float32), 0)
        if HAS_UP:
            left = tl.load(up_grad + places, mask=is_left, other=0)
            up_total = tl.dot(tl.trans(left), gathered, up_total, input_precision=PRECISION)
            if HAS_BIAS:
                up_sum += tl.sum(left.to(tl.float32), 0)
    is_entry = is_height[:, None] & is_column[None, :]
    entries = expert.to(tl.int64) * STRIDE_EXPERT + heights[:, None].to(tl.int64) * STRIDE_HEIGHT
    entries += columns[None, :].to(tl.int64) * STRIDE_WIDTH
    places = heights[:, None] * WIDTH + columns[None, :]
    _finish(gate_total, gate_table, gate_found, gate_left, entries, places, is_entry, is_continued, is_cut)
    if HAS_UP:
        _finish(up_total, up_table, up_found, up_left, entries, places, is_entry, is_continued, is_cut)
    if HAS_BIAS:  # noqa: SIM102 - decided when it is compiled
        if is_first_column:
            place = expert * BIAS_STRIDE_EXPERT + heights * BIAS_STRIDE_HEIGHT
            _add_to_sums(gate_sums, place, gate_sum, is_height)
            if HAS_UP:
                _add_to_sums(up_sums, place, up_sum, is_height)


@triton.jit
def _down_tile(
    activated, grad, weight, order, table, found, left_over, sums, expert, begin, end, first_row, heights, columns,
    is_continued, is_cut, is_first_height,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, STRIDE_EXPERT: tl.constexpr,
    STRIDE_HEIGHT: tl.constexpr, STRIDE_WIDTH: tl.constexpr, BIAS_STRIDE_EXPERT: tl.constexpr,
    BIAS_STRIDE_WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    is_height, is_column = heights < HEIGHT, columns < WIDTH
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    bias_sum = tl.zeros([TILE_COLUMNS], tl.float32)
    for start in range(begin, end, TILE_DEPTH):
        rows = start + tl.arange(0, TILE_DEPTH)
        is_row = rows < end
        assignments = tl.load(order + rows, mask=is_row, other=0)
        token = (assignments // TOP_K).to(tl.int64)
        is_gathered = is_row[:, None] & is_column[None, :]
        gathered = tl.load(grad + token[:, None] * WIDTH + columns[None, :], mask=is_gathered, other=0)
        places = (rows - first_row)[:, None] * HEIGHT + heights[None, :]
        left = tl.load(activated + places, mask=is_row[:, None] & is_height[None, :], other=0)
        total = tl.dot(tl.trans(left), gathered, total, input_precision=PRECISION)
        if HAS_BIAS:
            shared = gathered.to(tl.float32)
            if HAS_WEIGHT:
                shared = shared * tl.load(weight + assignments, mask=is_row, other=0).to(tl.float32)[:, None]
            bias_sum += tl.sum(shared, 0)
    is_entry = is_height[:, None] & is_column[None, :]
    entries = expert.to(tl.int64) * STRIDE_EXPERT + heights[:, None].to(tl.int64) * STRIDE_HEIGHT
    entries += columns[None, :].to(tl.int64) * STRIDE_WIDTH
    places = heights[:, None] * WIDTH + columns[None, :]
    _finish(total, table, found, left_over, entries, places, is_entry, is_continued, is_cut)
    if HAS_BIAS:  # noqa: SIM102 - decided when it is compiled
        if is_first_height:
            place = expert * BIAS_STRIDE_EXPERT + columns * BIAS_STRIDE_WIDTH
            _add_to_sums(sums, place, bias_sum, is_column)


@triton.jit(do_not_specialize=["first_row", "last_row"])
def _weight_gradient_kernel(
    gate_grad, up_grad, hidden, activated, grad, weight, order, offsets,
    gate_table, up_table, down_table, gate_found, up_found, down_found, gate_left, up_left, down_left,
    gate_sums, up_sums, down_sums, first_row, last_row,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    STRIDE_EXPERT: tl.constexpr, STRIDE_HEIGHT: tl.constexpr, STRIDE_WIDTH: tl.constexpr,
    DOWN_STRIDE_EXPERT: tl.constexpr, DOWN_STRIDE_HEIGHT: tl.constexpr, DOWN_STRIDE_WIDTH: tl.constexpr,
    BIAS_STRIDE_EXPERT: tl.constexpr, BIAS_STRIDE_HEIGHT: tl.constexpr,
    DOWN_BIAS_STRIDE_EXPERT: tl.constexpr, DOWN_BIAS_STRIDE_WIDTH: tl.constexpr,
    HAS_PROJECTIONS: tl.constexpr, HAS_DOWN: tl.constexpr, HAS_UP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, IS_FIRST_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    own_begin = tl.load(offsets + expert).to(tl.int32)
    own_end = tl.load(offsets + expert + 1).to(tl.int32)
    begin, end = tl.maximum(own_begin, first_row), tl.minimum(own_end, last_row)
    is_empty = IS_FIRST_WINDOW & (own_begin == own_end)
    if (begin >= end) & (is_empty == 0):
        return
    num_columns: tl.constexpr = tl.cdiv(WIDTH, TILE_COLUMNS)
    row_tile, column_tile = tl.program_id(0) // num_columns, tl.program_id(0) % num_columns
    heights = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_continued = own_begin < first_row
    is_cut = (own_end > last_row) & (begin < end)  # experts without rows stand anywhere, and are complete
    if HAS_PROJECTIONS:  # noqa: SIM102 - decided when it is compiled
        if tl.program_id(2) == 0:
            _projections_tile(
                gate_grad, up_grad, hidden, order, gate_table, up_table, gate_found, up_found, gate_left, up_left,
                gate_sums, up_sums, expert, begin, end, first_row, heights, columns, is_continued, is_cut,
                column_tile == 0, HEIGHT, WIDTH, TOP_K, STRIDE_EXPERT, STRIDE_HEIGHT, STRIDE_WIDTH,
                BIAS_STRIDE_EXPERT, BIAS_STRIDE_HEIGHT, HAS_BIAS, HAS_UP, PRECISION, TILE_ROWS, TILE_COLUMNS,
                TILE_DEPTH,
            )  # fmt: skip
    if HAS_DOWN:  # noqa: SIM102 - decided when it is compiled
        if tl.program_id(2) == HAS_PROJECTIONS:
            _down_tile(
                activated, grad, weight, order, down_table, down_found, down_left, down_sums, expert, begin, end,
                first_row, heights, columns, is_continued, is_cut, row_tile == 0, HEIGHT, WIDTH, TOP_K,
                DOWN_STRIDE_EXPERT, DOWN_STRIDE_HEIGHT, DOWN_STRIDE_WIDTH, DOWN_BIAS_STRIDE_EXPERT,
                DOWN_BIAS_STRIDE_WIDTH, HAS_BIAS, HAS_WEIGHT, PRECISION, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH,
            )  # fmt: skip


Stages = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TableGradients:
    """Where gradients of the parameters go.

    Args:
        tables: views of them; what they hold before is never read. Biases are [E,F] and [E,H] fp32, zeros at first.
        stages: of gate, up and down two of one expert, [F,H] fp32; never read before they are written.
        has_projections, has_down: which are written; what is not may be anything of the same shape.
    """

    tables: Tables
    stages: tuple[Stages, Stages, Stages]
    has_projections: bool
    has_down: bool

    @staticmethod
    def of(
        tables: Tables, *, has_projections: bool = True, has_down: bool = True, is_cut: bool = True
    ) -> TableGradients:
        """With new stages.

        Args:
            is_cut: whether a window may cut an expert; in a layer of one window there is nothing to stage.
        """

        def stages(is_written: bool) -> Stages:
            size = (tables.width, tables.hidden) if is_cut and is_written else (1,)
            return tables.gate.new_empty(size, dtype=torch.float32), tables.gate.new_empty(size, dtype=torch.float32)

        of_gate = stages(has_projections)
        of_up = of_gate if tables.up is tables.gate else stages(has_projections)
        return TableGradients(tables, (of_gate, of_up, stages(has_down)), has_projections, has_down)


def weight_gradient(
    rows: tuple[torch.Tensor, torch.Tensor],
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
        rows: gradients of gate's and up's products, [R,F] of the window, contiguous; the first alone is read where up
            is gate.
        hidden: [T,H], contiguous, gathered row by row; as `grad` is, of the output.
        activated: act(g, u) * weight, [R,F], contiguous.
        weight: [N] by assignment, or None for ones.
        into: of `TableGradients.of`, for all windows of a layer.
        precision: of products of fp32, "ieee" or "tf32".
    """
    tables, down = into.tables, into.tables.down.mT
    found, left = window.number % 2, (window.number + 1) % 2
    has_bias, has_up = tables.gate_bias is not None, tables.up is not tables.gate
    constants = {
        "HEIGHT": tables.width,
        "WIDTH": tables.hidden,
        "TOP_K": routing.top_k,
        **_strides("", tables.gate, ("EXPERT", "HEIGHT", "WIDTH")),
        **_strides("DOWN_", down, ("EXPERT", "HEIGHT", "WIDTH")),
        **_strides("BIAS_", tables.gate_bias, ("EXPERT", "HEIGHT")),
        **_strides("DOWN_BIAS_", tables.down_bias, ("EXPERT", "WIDTH")),
        "HAS_PROJECTIONS": into.has_projections,
        "HAS_DOWN": into.has_down,
        "HAS_UP": has_up,
        "HAS_BIAS": has_bias,
        "HAS_WEIGHT": has_bias and weight is not None,
        "IS_FIRST_WINDOW": window.number == 0,
        "PRECISION": precision,
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "TILE_DEPTH": tiles.depth,
    }
    arguments = {
        "gate_grad": rows[0],
        "up_grad": rows[1],
        "hidden": hidden,
        "activated": activated,
        "grad": grad,
        "weight": grad if weight is None or not has_bias else weight,
        "order": routing.order,
        "offsets": routing.offsets,
        "gate_table": tables.gate,
        "up_table": tables.up,
        "down_table": down,
        **{f"{name}_found": stage[found] for name, stage in zip(_NAMES, into.stages, strict=True)},
        **{f"{name}_left": stage[left] for name, stage in zip(_NAMES, into.stages, strict=True)},
        "gate_sums": tables.gate if tables.gate_bias is None else tables.gate_bias,
        "up_sums": tables.gate if tables.up_bias is None else tables.up_bias,
        "down_sums": tables.gate if tables.down_bias is None else tables.down_bias,
        "first_row": window.first,
        "last_row": window.last,
    }
    num_tiles = ceil_div(tables.width, tiles.rows) * ceil_div(tables.hidden, tiles.columns)
    grid = (num_tiles, tables.num_experts, int(into.has_projections) + int(into.has_down))
    launch(_weight_gradient_kernel, grid, arguments, constants, tiles)


_NAMES = ("gate", "up", "down")


def _strides(prefix: str, tensor: torch.Tensor | None, axes: Sequence[str]) -> dict[str, int]:
    strides = [0] * len(axes) if tensor is None else tensor.stride()
    return {f"{prefix}STRIDE_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def reference_weight_gradient(
    rows: tuple[torch.Tensor, torch.Tensor],
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
        tokens, grads = (one[assignments // routing.top_k].float() for one in (hidden, grad))
        totals.gate[expert] += rows[0][here].float().T @ tokens
        if totals.up is not totals.gate:
            totals.up[expert] += rows[1][here].float().T @ tokens
        totals.down[expert] += grads.T @ activated[here].float()
        if totals.gate_bias is None or totals.up_bias is None or totals.down_bias is None:
            continue
        totals.gate_bias[expert] += rows[0][here].float().sum(0)
        if totals.up is not totals.gate:
            totals.up_bias[expert] += rows[1][here].float().sum(0)
        shares = 1.0 if weight is None else weight[assignments, None].float()
        totals.down_bias[expert] += (grads * shares).sum(0)


def weight_gradient_accesses(launch: Launch, load: Load) -> list[Access]:
    """What a launch of the kernel loads and stores."""
    told, (num_tiles, num_experts, num_parts) = launch.constants, launch.grid
    found = [Access("offsets", 2 * num_tiles * num_experts * num_parts, num_experts + 1)]
    num_orders = num_tiles * load.num_rows * num_parts
    found.append(Access("order", num_orders, load.num_rows))
    if told["HAS_PROJECTIONS"]:
        names = ("gate", "up") if told["HAS_UP"] else ("gate",)
        found += _part_accesses(launch, load, "hidden", {f"{name}_grad": name for name in names})
    if told["HAS_DOWN"]:
        found += _part_accesses(launch, load, "grad", {"activated": "down"})
        if told["HAS_BIAS"] and told["HAS_WEIGHT"]:
            found.append(Access("weight", num_tiles * load.num_rows, load.num_rows))
    return found


def _part_accesses(launch: Launch, load: Load, tokens: str, lefts: dict[str, str]) -> list[Access]:
    """Of the projections, or of down.

    Args:
        lefts: the table of each argument whose rows are multiplied.
    """
    told, rows = launch.constants, load.num_rows
    height, width = told["HEIGHT"], told["WIDTH"]
    num_heights, num_widths = ceil_div(height, told["TILE_ROWS"]), ceil_div(width, told["TILE_COLUMNS"])
    num_run = load.num_present + told["IS_FIRST_WINDOW"] * load.num_empty
    size = height * width
    found = [Access(tokens, num_heights * rows * width, load.num_tokens * width)]
    for left, table in lefts.items():
        found.append(Access(left, num_widths * rows * height, rows * height))
        num_written = (num_run - load.is_cut) * size
        found.append(Access(f"{table}_table", num_written, num_written, "store"))
        if load.is_continued:
            found.append(Access(f"{table}_found", size, size))
        if load.is_cut:
            found.append(Access(f"{table}_left", size, size, "store"))
        if told["HAS_BIAS"]:
            num_sums = num_run * (width if table == "down" else height)
            found += [Access(f"{table}_sums", num_sums, num_sums), Access(f"{table}_sums", num_sums, num_sums, "store")]
    return found
