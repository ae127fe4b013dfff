"""The plan of one MoE layer from its sizes and byte terms alone: no model, no weights, nothing allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memfine_fx.config import Axis, MemoryBudget, parse_budget
from memfine_fx.errors import ConfigError
from memfine_fx.memory.region_bytes import RegionBytes, region_peak
from memfine_fx.plan.rows import plan_region
from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.schedule import rows_schedule

__all__ = ["LayerSizes", "LayerWork", "RowsPoint", "doubled_rows", "plan_layer", "sweep_rows"]


@dataclass(frozen=True)
class LayerSizes:
    """One layer with stacked gate-up [E,2F,H] and down [E,H,F] weights.

    Raises:
        ConfigError: a size is not positive, or K exceeds E.
    """

    num_tokens: int
    hidden: int
    expert_width: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("num_tokens", "hidden", "expert_width", "num_experts", "top_k"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}")


@dataclass(frozen=True)
class RowsPoint:
    """The cost of R rows a chunk: the predicted peak, and the number of chunks with rows spread evenly, or on as few
    experts as top-k allows."""

    rows: int
    peak_bytes: int
    chunks_balanced: int
    chunks_skewed: int


def plan_layer(
    sizes: LayerSizes,
    region: RegionBytes,
    *,
    memory_budget: MemoryBudget = None,
    axis: Axis = "rows",
    rows_per_chunk: int | None = None,
) -> tuple[ChunkPlan, dict[str, int]]:
    """Return (plan, bytes by term at its peak).

    Args:
        region: the layer's byte terms.
        memory_budget: bytes the layer may use beyond its parameters; a fraction is not accepted here.
        axis: which way to chunk.
        rows_per_chunk: R at most, or None for the planner's choice.

    Raises:
        ConfigError: the budget is a fraction or malformed.
        BudgetInfeasible: no chunk size fits.
    """
    if isinstance(memory_budget, float):
        raise ConfigError(f"memory_budget={memory_budget!r}: a layer's plan needs bytes, not a fraction of a device")
    available = parse_budget(memory_budget)
    plan = plan_region(
        region,
        sizes.num_tokens,
        axis=axis,
        rows_per_chunk=rows_per_chunk,
        budget_bytes=available,
        available_bytes=available,
    )
    return plan, region_peak(region, sizes.num_tokens, plan.rows_per_chunk, axis)


def sweep_rows(sizes: LayerSizes, region: RegionBytes, *, smallest: int = 64) -> list[RowsPoint]:
    """The rows axis at R = `smallest`, twice that and so on, up to all routed rows."""
    num_routed = sizes.num_tokens * sizes.top_k
    per_expert = [num_routed * expert // sizes.num_experts for expert in range(sizes.num_experts + 1)]
    largest = min(sizes.num_tokens, num_routed)
    on_few = [min(num_routed, largest * expert) for expert in range(sizes.num_experts + 1)]
    points = []
    for rows in doubled_rows(num_routed, smallest):
        peak = sum(region_peak(region, sizes.num_tokens, rows).values())
        balanced, skewed = (
            len(rows_schedule(offsets, rows, groups=region.takes_group)) for offsets in (per_expert, on_few)
        )
        points.append(RowsPoint(rows, peak, balanced, skewed))
    return points


def doubled_rows(num_routed: int, smallest: int) -> Iterator[int]:
    """R = `smallest`, twice that and so on, up to all routed rows."""
    rows = min(smallest, num_routed)
    while rows < num_routed:
        yield rows
        rows = min(2 * rows, num_routed)
    yield num_routed


@dataclass(frozen=True)
class LayerWork:
    """A layer's byte terms, bytes saved of each routed row, matmul FLOPs of a step on one routed row."""

    region: RegionBytes
    saved_row_bytes: int
    flops_per_row: int
