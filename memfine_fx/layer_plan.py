"""The plan of one SwiGLU MoE layer from its sizes alone: no model, no weights, nothing allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from memfine_fx.config import Axis, MemoryBudget, parse_budget
from memfine_fx.errors import ConfigError
from memfine_fx.memory.kernel_scratch import product_scratch
from memfine_fx.memory.region_bytes import RegionBytes, added_bytes, region_peak
from memfine_fx.passes.bodies import ExpertBodies, bodies_for
from memfine_fx.passes.tracing import TensorSpec
from memfine_fx.planner import plan_region
from memfine_fx.records import ChunkPlan, ExpertFunction, Keep
from memfine_fx.runtime.bodies import KeepingBodies
from memfine_fx.runtime.schedule import rows_schedule

__all__ = ["LayerSizes", "LayerWork", "RowsPoint", "doubled_rows", "layer_work", "plan_swiglu_layer", "sweep_rows"]


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
    """What R rows a chunk cost: the predicted peak, and chunks with rows spread evenly or on as few experts
    as top-k allows."""

    rows: int
    peak_bytes: int
    chunks_balanced: int
    chunks_skewed: int


def plan_swiglu_layer(
    sizes: LayerSizes,
    *,
    memory_budget: MemoryBudget = None,
    axis: Axis = "rows",
    rows_per_chunk: int | None = None,
) -> tuple[ChunkPlan, dict[str, int]]:
    """(plan, bytes by term at its peak).

    Args:
        memory_budget: bytes the layer may use beyond its parameters; a fraction is not accepted here.
        axis: which way to chunk.
        rows_per_chunk: R at most, or None for the planner's choice.

    Raises:
        ConfigError: the budget is a fraction or malformed.
        BudgetInfeasible: no chunk size fits.
    """
    if isinstance(memory_budget, float):
        raise ConfigError(f"memory_budget={memory_budget!r}: a layer's plan needs bytes, not a fraction of a device")
    region = _region_bytes(sizes)
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


def sweep_rows(sizes: LayerSizes, *, smallest: int = 64) -> list[RowsPoint]:
    """The rows axis at R = `smallest`, twice that and so on, up to all routed rows."""
    region = _region_bytes(sizes)
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
    """A layer's byte terms, bytes kept of each routed row, matmul FLOPs of a step on one routed row."""

    region: RegionBytes
    kept_row_bytes: int
    flops_per_row: int


def layer_work(sizes: LayerSizes, keep: Keep) -> LayerWork:
    """What a step of the layer takes where forward keeps so much; backward computes the rest again."""
    bodies = _bodies(sizes)
    again = _keeping(bodies, "projections").flops_per_row
    region = _region_bytes(sizes)
    if keep == "nothing":
        return LayerWork(region, 0, 3 * bodies.flops_per_row + again)
    keeping = _keeping(bodies, keep)
    region = replace(
        region,
        forward_peak=keeping.forward.peak_bytes,
        backward_peak=keeping.backward.peak_bytes,
        forward_results=keeping.forward.results_bytes,
        backward_results=keeping.backward.results_bytes,
    )
    return LayerWork(region, keeping.row_bytes, 3 * bodies.flops_per_row + again - keeping.flops_per_row)


def _keeping(bodies: ExpertBodies, keep: Keep) -> KeepingBodies:
    keeping = bodies.keeping(keep, _ALL_WANTED)
    assert keeping is not None, "a SwiGLU expert has projections to keep"
    return keeping


_ALL_WANTED = (True, True, True, True)


def _bodies(sizes: LayerSizes) -> ExpertBodies:
    hidden, width, dtype, place = sizes.hidden, sizes.expert_width, sizes.dtype, torch.device(sizes.device)
    specs = (
        TensorSpec((hidden,), dtype, place, per_row=True),
        TensorSpec((), dtype, place, per_row=True),
        TensorSpec((2 * width, hidden), dtype, place),
        TensorSpec((hidden, width), dtype, place),
    )
    function = ExpertFunction(fx.symbolic_trace(_swiglu_expert), has_weight=True, param_kinds=("expert", "expert"))
    return bodies_for(function, specs, takes_group=False, inner="inductor")


def _region_bytes(sizes: LayerSizes) -> RegionBytes:
    hidden, width, num_experts, dtype = sizes.hidden, sizes.expert_width, sizes.num_experts, sizes.dtype
    place = torch.device(sizes.device)
    bodies = _bodies(sizes)
    forward, backward = bodies.forward(), bodies.backward(_ALL_WANTED)
    is_low_precision = dtype is not torch.float32
    num_weights = 3 * width * hidden
    return RegionBytes(
        top_k=sizes.top_k,
        num_experts=num_experts,
        hidden=hidden,
        out_width=hidden,
        item_bytes=dtype.itemsize,
        out_item_bytes=dtype.itemsize,
        contribution_item_bytes=dtype.itemsize,
        accumulator_item_bytes=4,
        weight_item_bytes=dtype.itemsize,
        param_bytes=num_experts * num_weights * dtype.itemsize,
        staging_bytes=4 * num_weights if is_low_precision else 0,
        added_bytes=added_bytes(2 * width * hidden, 2, place.type) if is_low_precision else 0,
        forward_peak=forward.peak_bytes,
        backward_peak=backward.peak_bytes,
        takes_group=False,
        flops_per_row=bodies.flops_per_row,
        forward_results=forward.results_bytes,
        backward_results=backward.results_bytes,
        product_scratch=product_scratch([(2 * width, hidden)], dtype, place.type),
        device_type=place.type,
    )


def _swiglu_expert(rows: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = torch.mm(rows, gate_up.t()).chunk(2, dim=-1)
    return torch.mm(torch.nn.functional.silu(gate) * up, down.t()) * weight.unsqueeze(1)
