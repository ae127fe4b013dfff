"""Byte terms of a raised region with the compiled functions that it runs, and how many tokens it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch

from memfine_fx.compat.shapes import hints_of_symbols
from memfine_fx.kernels.adapter_tables import trained_adapters
from memfine_fx.kernels.tables import KernelForm, trained_parts
from memfine_fx.kernels.tiling import LEAST_COLUMNS
from memfine_fx.memory.kernel_scratch import gradient_scratch
from memfine_fx.memory.region_bytes import RegionBytes, WindowBytes, added_bytes
from memfine_fx.passes.dataflow import tensor_of
from memfine_fx.passes.lower.compiled_expert import CompiledExpertFunction
from memfine_fx.passes.tracing import TensorSpec
from memfine_fx.records import MoERegion, SavePolicy
from memfine_fx.runtime.loop import accumulator_dtype
from memfine_fx.runtime.routing import group_params

if TYPE_CHECKING:
    from memfine_fx.expert_parallel.sharded import ShardedExperts

__all__ = [
    "argument_specs",
    "gradient_shapes",
    "num_tokens_hint",
    "num_tokens_of",
    "param_groups",
    "region_bytes",
    "wanted_gradients",
]


def region_bytes(
    region: MoERegion,
    compiled_expert: CompiledExpertFunction,
    output: torch.Tensor,
    exchange: ShardedExperts | None,
    kernels: KernelForm | None,
    policy: SavePolicy,
) -> RegionBytes:
    """Return the byte terms of a region whose forward saves by a policy.

    Args:
        region: as it lowers.
        compiled_expert: what it runs; once they are compiled, their peaks are those of the compiled code.
        output: fake tensor of the combined output.
        exchange: how its rows travel between ranks, None on a single one.
        kernels: the form in which the GPU kernels run it, None where compiled functions do.
        policy: what forward saves of the routed rows.
    """
    hidden = tensor_of(region.hidden)
    params = [tensor_of(node) for node in region.params]
    wanted = wanted_gradients(region, compiled_expert)
    trained = [param for param in params if param.requires_grad]
    low_precision = [param.dtype for param in trained if accumulator_dtype(param.dtype) is not param.dtype]
    shapes = gradient_shapes(region) if low_precision else []
    elements = [math.prod(shape) for shape in shapes]
    weight = None if region.routing_weight is None else tensor_of(region.routing_weight)
    saving = None if policy == "nothing" else compiled_expert.saving(policy, wanted)
    pairs = [] if saving is None else [(saving.forward, saving.backward)]
    if saving is None or exchange is not None:  # on several ranks only some rounds are saved, the others run as without
        pairs.append((compiled_expert.forward(), compiled_expert.backward(wanted)))
    return RegionBytes(
        top_k=region.dims.top_k,
        num_experts=region.dims.num_experts,
        hidden=region.dims.hidden,
        out_width=compiled_expert.out_width,
        item_bytes=hidden.dtype.itemsize,
        out_item_bytes=output.dtype.itemsize,
        contribution_item_bytes=compiled_expert.contribution_dtype.itemsize,
        accumulator_item_bytes=accumulator_dtype(output.dtype).itemsize,
        weight_item_bytes=0 if weight is None else weight.dtype.itemsize,
        param_bytes=sum(_num_bytes(param) for param in trained),
        staging_bytes=0 if kernels is not None else 4 * sum(elements),
        added_bytes=0 if kernels is not None else added_bytes(max(elements, default=0), 2, output.device.type),
        forward_peak=sympy.Max(*(forward.peak_bytes for forward, _ in pairs)),
        backward_peak=sympy.Max(*(backward.peak_bytes for _, backward in pairs)),
        takes_group=compiled_expert.takes_group,
        flops_per_row=compiled_expert.flops_per_row,
        forward_results=sympy.Max(*(forward.results_bytes for forward, _ in pairs)),
        backward_results=sympy.Max(*(backward.results_bytes for _, backward in pairs)),
        device_type=output.device.type,
        product_scratch=gradient_scratch(shapes, (low_precision or [hidden.dtype])[0], output.device.type),
        all_to_all=None if exchange is None else exchange.all_to_all,
        clones_forward=_clones_bytes(region, exchange, backward=False),
        clones_backward=_clones_bytes(region, exchange, backward=True),
        window=None if kernels is None else _window_bytes(region, kernels, hidden, output, wanted),
    )


def _window_bytes(
    region: MoERegion, form: KernelForm, hidden: torch.Tensor, output: torch.Tensor, wanted: Sequence[bool]
) -> WindowBytes:
    """See `kernels.layer`: what it holds from window to window."""
    num_own = form.num_own
    of_params = [wanted[2 + place] for place in form.positions]
    trains_projections, trains_down = trained_parts(
        form.layout, of_params[:num_own], has_bias=form.has_bias, sources=form.sources
    )
    narrow_row, narrow_stages = _adapter_bytes(region, form, of_params[num_own:], hidden.dtype.itemsize)
    _, trains_down_adapter = trained_adapters(form.adapters, of_params[num_own:])
    num_products = 1 + form.has_up
    groups = param_groups(region)
    in_front = (region.dims.num_experts,) if form.is_list else ()
    width = form.width(lambda position: (*in_front, *groups[position][0].shape))
    matrix = width * region.dims.hidden
    row = width * hidden.dtype.itemsize
    return WindowBytes(
        forward_row=row + narrow_row,
        backward_row=row * (num_products + (trains_down or trains_down_adapter)) + 2 * narrow_row,
        assignment=0 if region.routing_weight is None else 4 * -(-width // LEAST_COLUMNS),
        token=0 if output.dtype is hidden.dtype else region.dims.hidden * hidden.dtype.itemsize,
        stages=2 * 4 * (num_products * trains_projections + trains_down) * matrix + narrow_stages,
    )


def _adapter_bytes(region: MoERegion, form: KernelForm, wanted: Sequence[bool], item_bytes: int) -> tuple[int, int]:
    """(bytes of a row's narrow rows; of what adapters' gradients of an expert take in fp32, where a window cuts it)."""
    present = [adapter for adapter in form.adapters if adapter is not None]
    trains_projections, trains_down = trained_adapters(form.adapters, wanted)
    num_of_projections = sum(adapter is not None for adapter in form.adapters[:-1])
    is_trained = [trains_projections] * num_of_projections + [trains_down] * (len(present) - num_of_projections)
    factors = [tensor_of(region.params[place]) for place in form.positions[form.num_own :]]
    sizes = [math.prod(factor.shape[1:]) for factor in factors]
    stages = 2 * 4 * sum(size * is_trained[place // 2] for place, size in enumerate(sizes))
    return item_bytes * sum(adapter.rank for adapter in present), stages


def _clones_bytes(region: MoERegion, exchange: ShardedExperts | None, *, backward: bool) -> int:
    """Return the bytes of the slots for clones of other ranks' experts, in backward with gradients; 0 without slots."""
    if exchange is None or not exchange.ranks.slots:
        return 0
    from memfine_fx.expert_parallel.clones import bytes_of_clones, can_clone

    kinds = region.expert_fn.param_kinds
    if not can_clone(kinds):
        return 0
    tables = [tensor_of(node) for node, kind in zip(region.params, kinds, strict=True) if kind == "expert"]
    return sum(
        bytes_of_clones(
            math.prod(table.shape[1:]),
            table.dtype,
            exchange.ranks.slots,
            int(table.shape[0]),
            with_gradients=backward and table.requires_grad,
        )
        for table in tables
    )


def num_tokens_of(region: MoERegion) -> sympy.Expr:
    """T as an expression in the graph's symbols; numbers that are no sizes (a capacity factor) as they are now."""
    num_tokens: Any = _count_of_tokens(region)
    if not isinstance(num_tokens, torch.SymInt):
        return sympy.Integer(num_tokens)
    expr: sympy.Expr = num_tokens.node.expr
    values = hints_of_symbols(num_tokens)
    return expr.subs({symbol: values[symbol] for symbol in expr.free_symbols if not symbol.is_integer})


def _count_of_tokens(region: MoERegion) -> Any:
    """T, an int or a symbol: tokens of the routing, or slots where there is a layout instead of an index."""
    if region.expert_index is None:
        return math.prod(tensor_of(region.hidden).shape[:-1])
    return math.prod(tensor_of(region.expert_index).shape) // region.dims.top_k


def num_tokens_hint(region: MoERegion) -> int | None:
    """T of the captured call: a number, or the hint of its symbol; None where it is data-dependent."""
    num_tokens: Any = _count_of_tokens(region)
    if isinstance(num_tokens, torch.SymInt):
        return None if num_tokens.node.hint is None else int(num_tokens.node.hint)
    return int(num_tokens)


def _num_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * tensor.dtype.itemsize


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


def wanted_gradients(region: MoERegion, compiled_expert: CompiledExpertFunction) -> tuple[bool, ...]:
    """Gradients that a step may want: of rows, of weights if any, and of parameters that are trained."""
    trained_groups = (any(param.requires_grad for param in group) for group in param_groups(region))
    return (True, compiled_expert.has_weight, *trained_groups)


def gradient_shapes(region: MoERegion) -> list[tuple[int, ...]]:
    """Return, for each parameter whose gradient is wanted, the shape of one expert's gradient."""
    return [
        tuple(map(int, group[0].shape[1 if kind == "expert" else 0 :]))
        for group, kind in zip(param_groups(region), region.expert_fn.param_kinds, strict=True)
        if any(param.requires_grad for param in group)
    ]
