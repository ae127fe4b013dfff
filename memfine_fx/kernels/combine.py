"""A window's rows added to their tokens over the inverse map: a token's rows by window, then by choice; no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.launches import Launch, Tiles, launch
from memfine_fx.kernels.sorting import Routing
from memfine_fx.kernels.traffic import Access, Load
from memfine_fx.kernels.windows import Window, ceil_div

__all__ = ["combine", "combine_accesses", "reference_combine"]


@triton.jit(do_not_specialize=["first_row", "last_row"])
def _combine_kernel(
    rows, inverse, result, first_row, last_row, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < COLUMNS
    total = tl.zeros([BLOCK], tl.float32)
    num_here = tl.zeros([BLOCK], tl.int32)
    for choice in range(TOP_K):
        row = tl.load(inverse + token * TOP_K + choice) + tl.zeros([BLOCK], tl.int32)
        is_here = is_column & (row >= first_row) & (row < last_row)
        place = rows + (row - first_row).to(tl.int64) * COLUMNS + columns
        total += tl.load(place, mask=is_here, other=0).to(tl.float32)
        num_here += is_here.to(tl.int32)
    is_changed = num_here > 0  # a token without rows in this window costs no traffic of width H
    before = tl.load(result + token * COLUMNS + columns, mask=is_changed, other=0)
    tl.store(result + token * COLUMNS + columns, before + total, mask=is_changed)


def combine(rows: torch.Tensor, routing: Routing, window: Window, result: torch.Tensor) -> None:
    """Add a window's rows [R,H] to `result`, [T,H] fp32."""
    columns = rows.shape[1]
    block = min(triton.next_power_of_2(columns), 1024)
    arguments = {
        "rows": rows,
        "inverse": routing.inverse,
        "result": result,
        "first_row": window.first,
        "last_row": window.last,
    }
    constants = {"COLUMNS": columns, "TOP_K": routing.top_k, "BLOCK": block}
    launch(_combine_kernel, (result.shape[0], ceil_div(columns, block)), arguments, constants, Tiles(1, block, 1, 4, 1))


def reference_combine(rows: torch.Tensor, routing: Routing, window: Window, result: torch.Tensor) -> None:
    """Compute `combine` in plain torch."""
    last = min(window.last, int(routing.offsets[-1]))
    tokens = routing.order[window.first : last].long() // routing.top_k
    result.index_add_(0, tokens, rows[: last - window.first].float())


def combine_accesses(launch: Launch, load: Load) -> list[Access]:
    """Return the loads and stores of one launch of the combine kernel."""
    columns, (num_tokens, num_blocks) = launch.constants["COLUMNS"], launch.grid
    num_assignments = num_tokens * launch.constants["TOP_K"]
    return [
        Access("inverse", num_assignments * num_blocks, num_assignments),
        Access("rows", load.num_rows * columns, load.num_rows * columns),
        Access("result", load.num_tokens * columns, load.num_tokens * columns),
        Access("result", load.num_tokens * columns, load.num_tokens * columns, "store"),
    ]
