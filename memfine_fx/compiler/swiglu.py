"""Memory and work of a training step of one SwiGLU MoE layer, computed from the layer's sizes.

The compiled functions of its expert are compiled for this; nothing is allocated.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from memfine_fx.memory.kernel_scratch import gradient_scratch
from memfine_fx.memory.region_bytes import RegionBytes, added_bytes
from memfine_fx.passes.lower.compiled_expert import CompiledExpertFunction, compiled_expert_for
from memfine_fx.passes.tracing import TensorSpec
from memfine_fx.plan.layer import LayerSizes, LayerWork
from memfine_fx.records import ExpertFunction, SavePolicy
from memfine_fx.runtime.compiled_expert import SavingFunctions

__all__ = ["layer_bytes", "layer_work"]


def layer_bytes(sizes: LayerSizes) -> RegionBytes:
    """Return the layer's byte terms where forward saves nothing, from compiled functions that are compiled for them."""
    hidden, width, num_experts, dtype = sizes.hidden, sizes.expert_width, sizes.num_experts, sizes.dtype
    place = torch.device(sizes.device)
    compiled_expert = _compiled_expert(sizes)
    forward, backward = compiled_expert.forward(), compiled_expert.backward(_ALL_WANTED)
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
        flops_per_row=compiled_expert.flops_per_row,
        forward_results=forward.results_bytes,
        backward_results=backward.results_bytes,
        product_scratch=gradient_scratch([(2 * width, hidden)], dtype, place.type),
        device_type=place.type,
    )


def layer_work(sizes: LayerSizes, policy: SavePolicy) -> LayerWork:
    """Return the memory and the work of a step of the layer.

    Args:
        sizes: of the layer.
        policy: the activations that forward saves for backward, which recomputes the rest.
    """
    compiled_expert = _compiled_expert(sizes)
    again = _saving(compiled_expert, "projections").flops_per_row
    region = layer_bytes(sizes)
    if policy == "nothing":
        return LayerWork(region, 0, 3 * compiled_expert.flops_per_row + again)
    saving = _saving(compiled_expert, policy)
    region = replace(
        region,
        forward_peak=saving.forward.peak_bytes,
        backward_peak=saving.backward.peak_bytes,
        forward_results=saving.forward.results_bytes,
        backward_results=saving.backward.results_bytes,
    )
    return LayerWork(region, saving.row_bytes, 3 * compiled_expert.flops_per_row + again - saving.flops_per_row)


def _saving(compiled_expert: CompiledExpertFunction, policy: SavePolicy) -> SavingFunctions:
    saving = compiled_expert.saving(policy, _ALL_WANTED)
    assert saving is not None, "a SwiGLU expert has projections to save"
    return saving


_ALL_WANTED = (True, True, True, True)


def _compiled_expert(sizes: LayerSizes) -> CompiledExpertFunction:
    hidden, width, dtype, place = sizes.hidden, sizes.expert_width, sizes.dtype, torch.device(sizes.device)
    specs = (
        TensorSpec((hidden,), dtype, place, per_row=True),
        TensorSpec((), dtype, place, per_row=True),
        TensorSpec((2 * width, hidden), dtype, place),
        TensorSpec((hidden, width), dtype, place),
    )
    function = ExpertFunction(fx.symbolic_trace(_swiglu_expert), has_weight=True, param_kinds=("expert", "expert"))
    return compiled_expert_for(function, specs, takes_group=False, inner="inductor")


def _swiglu_expert(rows: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = torch.mm(rows, gate_up.t()).chunk(2, dim=-1)
    return torch.mm(torch.nn.functional.silu(gate) * up, down.t()) * weight.unsqueeze(1)
