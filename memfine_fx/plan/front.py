"""Time against bytes of one layer: what each number of rows and each saved tensor costs, and what is best for each.

Bytes are the planner's, seconds the cost model's at this device's measured rates. Points that another one beats in both
are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from memfine_fx.errors import ConfigError
from memfine_fx.memory.region_bytes import region_peak
from memfine_fx.plan.cost import DeviceRates, rows_seconds
from memfine_fx.plan.layer import LayerSizes, LayerWork, doubled_rows
from memfine_fx.plan.rates import device_rates
from memfine_fx.records import SavePolicy

__all__ = ["FrontPoint", "MeasuredPoint", "layer_front", "read_measured"]

_POLICIES: tuple[SavePolicy, ...] = ("nothing", "projections", "operands")


@dataclass(frozen=True)
class FrontPoint:
    """One plan: R, what is saved, peak beyond parameters and gradients, seconds of one forward and backward."""

    rows: int
    policy: SavePolicy
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class MeasuredPoint:
    """The peak bytes and the seconds of a peer, as a benchmark row has them."""

    name: str
    peak_bytes: float
    seconds: float


def layer_front(
    sizes: LayerSizes, work_of: Callable[[LayerSizes, SavePolicy], LayerWork], *, smallest: int = 64
) -> list[FrontPoint]:
    """The plans that none beats in both bytes and seconds, least bytes first.

    Args:
        work_of: what a step takes where forward saves so much; that of SwiGLU is `compiler.swiglu.layer_work`.
        smallest: R to begin with; it is doubled up to all routed rows.
    """
    rates = device_rates(sizes.device, sizes.dtype)
    points = [
        point for policy in _POLICIES for point in _points(sizes, work_of(sizes, policy), policy, rates, smallest)
    ]
    front: list[FrontPoint] = []
    for point in sorted(points, key=lambda candidate: (candidate.peak_bytes, candidate.seconds)):
        if not front or point.seconds < front[-1].seconds:
            front.append(point)
    return front


def _points(
    sizes: LayerSizes, work: LayerWork, policy: SavePolicy, rates: DeviceRates, smallest: int
) -> Iterable[FrontPoint]:
    num_routed = sizes.num_tokens * sizes.top_k
    for rows in doubled_rows(num_routed, smallest):
        terms = region_peak(work.region, sizes.num_tokens, rows)
        peak = sum(terms.values()) - terms.get("expert weight grads", 0) + work.saved_row_bytes * num_routed
        yield FrontPoint(rows, policy, peak, _seconds(work, rates, num_routed, rows))


def _seconds(work: LayerWork, rates: DeviceRates, num_routed: int, rows: int) -> float:
    """Return the seconds of the experts; what is saved is read and written once more in forward, to new memory."""
    seconds = rows_seconds(
        rates,
        num_routed=num_routed,
        num_experts=work.region.num_experts,
        flops_per_row=work.flops_per_row,
        param_bytes=work.region.param_bytes,
        rows=rows,
        takes_group=work.region.takes_group,
    )
    saved_bytes = work.saved_row_bytes * num_routed
    return seconds + rates.saving_seconds(saved_bytes, saved_bytes)


def read_measured(path: str | Path) -> list[MeasuredPoint]:
    """Peers' points of a benchmark's JSON lines: the last row of each that has figures.

    Raises:
        ConfigError: the file is not there or holds something else.
    """
    latest_points: dict[str, MeasuredPoint] = {}
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            measured = row["measurement"]
            if measured is not None and not measured.get("series", {}).get("budget_bytes"):
                seconds = sorted(measured["step_seconds"])[len(measured["step_seconds"]) // 2]
                name = row["job"]["peer"]
                latest_points[name] = MeasuredPoint(name, measured["peak_bytes"], seconds)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no benchmark rows: {type(error).__name__}: {error}") from error
    return list(latest_points.values())
