"""The plan of one SwiGLU MoE layer from its sizes alone: no model, no weights, nothing allocated."""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx

from memfine_fx.config import MemoryBudget, parse_budget
from memfine_fx.errors import ConfigError
from memfine_fx.passes.bodies import bodies_for
from memfine_fx.passes.tracing import TensorSpec
from memfine_fx.planner import RegionBytes, plan_region, region_peak
from memfine_fx.records import ChunkPlan, ExpertFunction

__all__ = ["plan_swiglu_layer"]


def plan_swiglu_layer(
    *,
    num_tokens: int,
    hidden: int,
    expert_width: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    memory_budget: MemoryBudget = None,
    axis: Literal["rows", "tokens"] = "rows",
    device: str = "cpu",
) -> tuple[ChunkPlan, dict[str, int]]:
    """(plan, bytes by term at its peak) of a layer with stacked gate-up [E,2F,H] and down [E,H,F] weights.

    Args:
        memory_budget: bytes the layer may use beyond its parameters; a fraction is not accepted here.

    Raises:
        ConfigError: a size is not positive, or K exceeds E.
        BudgetInfeasible: no chunk size fits.
    """
    sizes = dict(tokens=num_tokens, hidden=hidden, width=expert_width, experts=num_experts, top_k=top_k)
    for name, size in sizes.items():
        if size <= 0:
            raise ConfigError(f"{name}={size} must be positive")
    if top_k > num_experts:
        raise ConfigError(f"top_k={top_k} exceeds experts={num_experts}")
    if isinstance(memory_budget, float):
        raise ConfigError(f"memory_budget={memory_budget!r}: a layer's plan needs bytes, not a fraction of a device")
    region = _region_bytes(hidden, expert_width, num_experts, top_k, dtype, device)
    available = parse_budget(memory_budget)
    plan = plan_region(region, num_tokens, axis=axis, budget_bytes=available, available_bytes=available)
    return plan, region_peak(region, num_tokens, plan.rows_per_chunk, axis)


def _region_bytes(
    hidden: int, width: int, num_experts: int, top_k: int, dtype: torch.dtype, device: str
) -> RegionBytes:
    place = torch.device(device)
    specs = (
        TensorSpec((hidden,), dtype, place, per_row=True),
        TensorSpec((), dtype, place, per_row=True),
        TensorSpec((2 * width, hidden), dtype, place),
        TensorSpec((hidden, width), dtype, place),
    )
    function = ExpertFunction(fx.symbolic_trace(_swiglu_expert), has_weight=True, param_kinds=("expert", "expert"))
    bodies = bodies_for(function, specs, folds_weight=True, takes_group=False, inner="inductor")
    is_low_precision = dtype is not torch.float32
    num_weights = 3 * width * hidden
    return RegionBytes(
        top_k=top_k,
        num_experts=num_experts,
        hidden=hidden,
        out_width=hidden,
        item_bytes=dtype.itemsize,
        out_item_bytes=dtype.itemsize,
        contribution_item_bytes=dtype.itemsize,
        accumulator_item_bytes=4,
        weight_item_bytes=dtype.itemsize,
        param_bytes=num_experts * num_weights * dtype.itemsize,
        staging_bytes=4 * num_weights + 4 * width * hidden if is_low_precision else 0,
        forward_peak=bodies.forward().peak_bytes,
        backward_peak=bodies.backward((True, True, True, True)).peak_bytes,
        takes_group=False,
        device_type=place.type,
    )


def _swiglu_expert(rows: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = torch.mm(rows, gate_up.t()).chunk(2, dim=-1)
    return torch.mm(torch.nn.functional.silu(gate) * up, down.t()) * weight.unsqueeze(1)
