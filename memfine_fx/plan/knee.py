"""Knee: how few rows a chunk may have at full speed, by rates of products that were measured for a layer's widths.

A chunk of R rows takes the products of its rows, at the rate that R rows reach; calls of operations; and what one more
chunk of an expert adds to the expert's gradient, in low precision through fp32 staging. The last two are shared by its
rows. So time for each row falls with R, and memory grows. Chosen is the smallest R that takes hardly more for each row
than the best one does.
"""

from __future__ import annotations

import torch

from memfine_fx.memory.region_bytes import RegionBytes
from memfine_fx.plan.cost import CALLS_PER_CHUNK, STEP_FLOPS, DeviceRates, Work
from memfine_fx.plan.rates import product_rates

__all__ = ["CHOICES", "knee_rows", "measured_knee"]

CHOICES = (64, 128, 256, 512, 1024, 2048)
_WORST = 1.01
"""Seconds a row that the choice may take, beside the best."""
_STAGED = 3
"""Times that fp32 staging is read or written for one more product: it is read, added to, and at last cast."""


def knee_rows(rates: DeviceRates, region: RegionBytes) -> int:
    """The smallest number of rows within 1% of the best time for each row.

    Args:
        rates: of products of the region's widths.
        region: its sizes.
    """
    seconds = {rows: _seconds(rates, region, rows) / rows for rows in CHOICES}
    return next(rows for rows in CHOICES if seconds[rows] <= _WORST * min(seconds.values()))


def _seconds(rates: DeviceRates, region: RegionBytes, rows: int) -> float:
    """Return the seconds of one of several chunks of an expert, forward and backward."""
    gradients = region.param_bytes / max(1, region.num_experts)
    moved = 2 * gradients if not region.staging_bytes else _STAGED * region.staging_bytes + 2 * gradients
    work = Work(STEP_FLOPS * region.flops_per_row * rows, moved, CALLS_PER_CHUNK)
    return work.seconds(rates, rows)


def measured_knee(region: RegionBytes, dtype: torch.dtype) -> int | None:
    """The knee of a layer on this machine's CPU, measured once for its widths; None where others decide: on other
    devices, and where rows come from other ranks or the experts of a chunk are multiplied at once.
    """
    if region.device_type != "cpu" or region.all_to_all is not None or region.takes_group or not region.flops_per_row:
        return None
    width = max(1, region.flops_per_row // (2 * region.hidden))
    return knee_rows(product_rates(region.device_type, dtype, region.hidden, width), region)
