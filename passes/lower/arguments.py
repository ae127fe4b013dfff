"""Arguments of a raised region's expert function: their layouts, their tensors, and the gradients a step may want."""

from __future__ import annotations

import torch

from memfine_fx.passes.dataflow import tensor_of
from memfine_fx.passes.lower.bodies import ExpertBodies
from memfine_fx.passes.tracing import TensorSpec
from memfine_fx.records import MoERegion
from memfine_fx.runtime.params import group_params

__all__ = ["argument_specs", "gradient_shapes", "param_groups", "wanted_gradients"]


def argument_specs(region: MoERegion) -> tuple[TensorSpec, ...]:
    """Specs of the expert function's arguments: rows, weight if any, parameters of one expert."""
    hidden = tensor_of(region.hidden)
    specs = [TensorSpec((region.dims.hidden,), hidden.dtype, hidden.device, per_row=True)]
    if region.routing_weight is not None:
        weight = tensor_of(region.routing_weight)
        specs.append(TensorSpec((), weight.dtype, weight.device, per_row=True))
    for tensors, kind in zip(param_groups(region), region.expert_fn.param_kinds, strict=True):
        param = tensors[0]
        skipped = 1 if kind == "expert" else 0
        shape = tuple(int(size) for size in param.shape[skipped:])
        stride = tuple(int(step) for step in param.stride()[skipped:])
        specs.append(TensorSpec(shape, param.dtype, param.device, stride=stride))
    return tuple(specs)


def param_groups(region: MoERegion) -> list[tuple[torch.Tensor, ...]]:
    """The tensors of each parameter of the expert function."""
    tensors = [tensor_of(node) for node in region.params]
    return group_params(tensors, region.expert_fn.param_kinds, region.dims.num_experts)


def wanted_gradients(region: MoERegion, bodies: ExpertBodies) -> tuple[bool, ...]:
    """Gradients that a step may want: of rows, of weights if any, and of parameters that are trained."""
    trained_groups = (any(param.requires_grad for param in group) for group in param_groups(region))
    return (True, bodies.has_weight, *trained_groups)


def gradient_shapes(region: MoERegion) -> list[tuple[int, ...]]:
    """Return, for each parameter whose gradient is wanted, the shape of one expert's gradient."""
    return [
        tuple(map(int, group[0].shape[1 if kind == "expert" else 0 :]))
        for group, kind in zip(param_groups(region), region.expert_fn.param_kinds, strict=True)
        if any(param.requires_grad for param in group)
    ]
