"""A region's step by the GPU kernels, where they are asked for and know its experts' form."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.kernels.window_size import KNOWN_RATES, DeviceFigures, LayerSizes, rows_per_window
from memfine_fx.runtime.kernels.windows import ceil_div
from memfine_fx.runtime.routed import Routed, sent
from memfine_fx.runtime.store import LiveRegion

if TYPE_CHECKING:  # these need Triton
    from memfine_fx.runtime.kernels.layer import LayerOptions
    from memfine_fx.runtime.kernels.sorting import Routing

__all__ = ["is_taken", "run_backward", "run_forward"]

_DEVICES = ("cuda",)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_ENTRIES = 2**31 - 1


def is_taken(region: LiveRegion, routed: Routed, plan: ChunkPlan) -> bool:
    """Whether the kernels run this step of a region: rows in windows of at most the plan's size, nothing kept."""
    if not region.uses_kernels or region.bodies.kernel_form is None or plan.axis != "rows":
        return False
    tensors = [routed.hidden, *(tensor for tensors in routed.params for tensor in tensors)]
    if routed.hidden.device.type not in _DEVICES or any(tensor.dtype not in _DTYPES for tensor in tensors):
        return False
    widest = max(size for tensor in tensors for size in tensor.shape[1:])
    return plan.rows_per_chunk * widest <= _MOST_ENTRIES and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def run_forward(region: LiveRegion, routed: Routed, plan: ChunkPlan) -> torch.Tensor:
    """Combined outputs, [T,H] of the region's dtype."""
    from memfine_fx.runtime.kernels import layer

    routing, options, params = _arguments(region, routed, plan)
    region.num_chunks = ceil_div(max(1, routing.num_rows), options.rows_per_window)
    region.largest_chunk = min(options.rows_per_window, routing.num_rows)
    out, _ = layer.run_forward(
        routed.hidden.contiguous(), _flat_weight(routed), routing, params, options, region.out_dtype
    )
    return out


def run_backward(
    grad: torch.Tensor, region: LiveRegion, routed: Routed, plan: ChunkPlan, wanted: Sequence[bool]
) -> list[torch.Tensor]:
    """Gradients of what is wanted, in the order hidden, weight, parameters."""
    from memfine_fx.runtime.kernels import layer

    routing, options, params = _arguments(region, routed, plan)
    form = region.bodies.kernel_form
    assert form is not None
    asked = [wanted[0], wanted[1], *(wanted[2 + position] for position in form.positions)]
    found = layer.run_backward(
        grad, routed.hidden.contiguous(), _flat_weight(routed), routing, params, None, options, asked
    )
    weight = None if found.weight is None else found.weight.view(-1, routed.top_k)
    by_position = dict(zip(form.positions, found.params, strict=True))
    gradients = [found.hidden, weight, *(by_position[position] for position in range(len(params)))]
    return [gradient for gradient in gradients if gradient is not None]


def _flat_weight(routed: Routed) -> torch.Tensor | None:
    return None if routed.flat_weight is None else routed.flat_weight.contiguous()


def _arguments(region: LiveRegion, routed: Routed, plan: ChunkPlan) -> tuple[Routing, LayerOptions, list[torch.Tensor]]:
    from memfine_fx.runtime.kernels.layer import LayerOptions
    from memfine_fx.runtime.kernels.sorting import Routing

    form = region.bodies.kernel_form
    assert form is not None
    offsets = sent(routed.offsets.to(torch.int32), routed.hidden.device)
    # The inverse map is for deterministic sums only.
    routing = Routing(routed.order, routed.order, offsets, routed.top_k)
    precision = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    params = [routed.params[position][0] for position in form.positions]
    options = LayerOptions(
        plan.rows_per_chunk, layout=form.layout, activation=form.activation, has_bias=form.has_bias, precision=precision
    )
    return routing, replace(options, rows_per_window=_rows(routed, params, options, plan)), params


def _rows(routed: Routed, params: Sequence[torch.Tensor], options: LayerOptions, plan: ChunkPlan) -> int:
    """R by the device's figures, at most the plan's; the plan's where there are none."""
    most, device = max(1, plan.rows_per_chunk), routed.hidden.device
    if device.type != "cuda":
        return most
    tables, tiles = options.tables_of(params), options.tiles_of(routed.hidden).gate_up
    sizes = LayerSizes(
        routed.order.shape[0], tables.num_experts, tables.hidden, tables.width, routed.hidden.element_size(),
        tiles.rows, tiles.columns, 2 + options.has_up,
    )  # fmt: skip
    return rows_per_window(sizes, _figures(device, routed.hidden.dtype), most)


@functools.cache
def _figures(device: torch.device, dtype: torch.dtype) -> DeviceFigures:
    """Units and L2 as the driver says, rates as data sheets do; fp32 at half of 16 bits, as tf32 is."""
    from memfine_fx.runtime.kernels.tiling import target_of

    told = torch.cuda.get_device_properties(device)
    flops, bandwidth = KNOWN_RATES[target_of(device)]
    rate = flops / 2 if dtype is torch.float32 else flops
    return DeviceFigures(told.multi_processor_count, told.L2_cache_size, rate, bandwidth)
