"""A layer's routed experts run by the GPU kernels: what the runtime calls in place of its loop over chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from memfine_fx.kernels.choice import can_run, precision_of_products, tiles_of
from memfine_fx.kernels.tables import KernelForm, ListTable, Param, num_projections_of
from memfine_fx.kernels.window_size import KNOWN_RATES, DeviceFigures, LayerSizes, rows_per_window
from memfine_fx.kernels.windows import most_rows
from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.compiled_expert import SavedTensor
from memfine_fx.runtime.halving import run_halved
from memfine_fx.runtime.loop import SavedRows
from memfine_fx.runtime.op import empty_order
from memfine_fx.runtime.routing import Routed, check_rows, group_params, sent
from memfine_fx.runtime.store import LiveRegion

if TYPE_CHECKING:  # these need Triton
    from memfine_fx.kernels.layer import Gradients, LayerOptions, Products
    from memfine_fx.kernels.sorting import Routing

__all__ = ["KernelExperts", "route_on_device"]

ResultT = TypeVar("ResultT")
_MOST_ENTRIES = 2**31 - 1


@torch.library.custom_op(
    "memfine::route_on_device",
    mutates_args=(),
    schema="(Tensor expert_index, SymInt num_experts) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def route_on_device(expert_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort a layer's assignments by expert, as `memfine::route` does, without waiting for the device.

    Returns:
        Assignments in expert order [N] int32, undefined behind the last expert's; and offsets [E+1] int32, on the
        device, of each expert's first assignment.
    """
    from memfine_fx.kernels.sorting import sort_assignments

    check_rows(expert_index.numel())
    routing = sort_assignments(expert_index, num_experts)
    return routing.order, routing.offsets


@route_on_device.register_fake
def _(expert_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_order(expert_index), expert_index.new_empty((num_experts + 1,), dtype=torch.int32)


@dataclass(frozen=True)
class KernelExperts:
    """The kernels as `memfine_fx.runtime.store.ExpertKernels`, for expert functions of one form."""

    form: KernelForm

    def can_run(self, tensors: Sequence[torch.Tensor]) -> bool:
        return can_run(self.form, tensors)

    def can_save(self, tensors: Sequence[SavedTensor], dtype: torch.dtype) -> bool:
        # Compiled functions save the projections' products at least: as many wide tensors as projections are these.
        are_rows = all(len(tensor.shape) == 1 and tensor.dtype is dtype for tensor in tensors)
        return are_rows and len(_wide(self.form, tensors)) == num_projections_of(self.form.layout)

    def forward(self, region: LiveRegion, routed: Routed, plan: ChunkPlan, saved: SavedRows | None) -> torch.Tensor:
        from memfine_fx.kernels import layer

        routing, options, params, products = _arguments(self.form, routed, plan, saved)

        def run(rows: int) -> torch.Tensor:
            sized = replace(options, rows_per_window=rows)
            windows = layer.layer_windows(routing, sized, products)
            region.num_chunks, region.largest_chunk = len(windows), most_rows(windows)
            region.stages_gradients = len(windows) > 1
            hidden, weight = routed.hidden.contiguous(), _flat_weight(routed)
            return layer.run_forward(hidden, weight, routing, params, sized, region.out_dtype, products)[0]

        return _halved(run, region, routed, options, params)

    def backward(
        self,
        grad: torch.Tensor,
        region: LiveRegion,
        routed: Routed,
        plan: ChunkPlan,
        wanted: Sequence[bool],
        saved: SavedRows | None,
        onto: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        from memfine_fx.kernels import layer

        form = self.form
        routing, options, params, products = _arguments(form, routed, plan, saved)
        kinds, num_experts = region.compiled_expert.param_kinds, region.num_experts
        wanted_groups = group_params(wanted[2:], kinds, num_experts)
        layer_wanted = [wanted[0], wanted[1], *(any(wanted_groups[position]) for position in form.positions)]
        onto_groups = group_params(onto, kinds, num_experts)
        places = [onto_groups[position] if form.is_list else onto_groups[position][0] for position in form.positions]

        def run(rows: int) -> Gradients:
            sized = replace(options, rows_per_window=rows)
            hidden, weight = routed.hidden.contiguous(), _flat_weight(routed)
            return layer.run_backward(grad, hidden, weight, routing, params, products, sized, layer_wanted, places)

        result = _halved(run, region, routed, options, params)
        weight = None if result.weight is None else result.weight.view(-1, routed.top_k)
        by_position = dict(zip(form.positions, result.params, strict=True))
        gradients = [result.hidden, weight]
        for position, are_wanted in enumerate(wanted_groups):
            gradient = by_position[position]
            if gradient is None or isinstance(gradient, torch.Tensor):
                gradients.append(gradient)
            else:
                gradients += [
                    param_grad for param_grad, is_wanted in zip(gradient, are_wanted, strict=True) if is_wanted
                ]
        return [gradient for gradient in gradients if gradient is not None]


def _wide(form: KernelForm, tensors: Sequence[SavedTensor]) -> list[int]:
    """Return the positions of saved tensors other than adapters' narrow rows, which the kernels always recompute."""
    ranks = [adapter.rank for adapter in form.adapters if adapter is not None]
    return [place for place, tensor in enumerate(tensors) if tensor.shape[0] not in ranks]


def _products(saved: SavedRows, form: KernelForm) -> Products:
    """Return the places of gate's and up's products among the saved tensors, [M,F] each; one place twice without up.

    The kernels write into the places of the compiled functions' products in a layout of their own (with biases, and
    gate before up where expert weights alternate), which only their own backward reads.
    """
    tensors = [saved.tensors[place] for place in _wide(form, saved.functions.saved)]
    if not form.has_up:
        (both,) = tensors
        return both, both
    if num_projections_of(form.layout) == 2:
        gate, up = tensors
    else:
        (both,) = tensors
        gate, up = both.chunk(2, dim=1)
    return gate, up


def _halved(
    run: Callable[[int], ResultT],
    region: LiveRegion,
    routed: Routed,
    options: LayerOptions,
    params: Sequence[Param],
) -> ResultT:
    """Run a layer forward or backward, in smaller windows where memory runs out, now and in the steps to come."""

    def needs() -> list[tuple[str, int]]:
        return [("row of a window", 3 * options.tables_of(params).width * routed.hidden.element_size())]

    result, limit = run_halved(run, options.rows_per_window, needs=needs)
    if limit is not None:
        region.lower(routed.num_tokens, limit)
    return result


def _flat_weight(routed: Routed) -> torch.Tensor | None:
    return None if routed.flat_weight is None else routed.flat_weight.contiguous()


def _arguments(
    form: KernelForm, routed: Routed, plan: ChunkPlan, saved: SavedRows | None
) -> tuple[Routing, LayerOptions, list[Param], Products | None]:
    from memfine_fx.kernels.layer import LayerOptions
    from memfine_fx.kernels.sorting import Routing

    offsets = routed.offsets
    if offsets.device != routed.hidden.device or offsets.dtype is not torch.int32:
        offsets = sent(offsets.to(torch.int32), routed.hidden.device)
    # The inverse map is for deterministic sums only.
    routing = Routing(routed.order, routed.order, offsets, routed.top_k)
    of_each = [routed.params[position] for position in form.positions]
    params: list[Param] = [ListTable.of(tensors) if form.is_list else tensors[0] for tensors in of_each]
    products = None if saved is None else _products(saved, form)
    options = LayerOptions(
        plan.rows_per_chunk, layout=form.layout, activation=form.activation, has_bias=form.has_bias,
        saves_products=products is not None, precision=precision_of_products(), sources=form.sources,
        adapters=form.adapters, tiles=tiles_of(form, routed.hidden, params, routed.top_k, measures=False),
    )  # fmt: skip
    return routing, replace(options, rows_per_window=_rows(routed, params, options, plan)), params, products


def _rows(routed: Routed, params: Sequence[Param], options: LayerOptions, plan: ChunkPlan) -> int:
    """Return the rows per window that the device's figures ask for: at most the plan's, and what 32 bits count."""
    tables = options.tables_of(params)
    widest = max(tables.hidden, *(table.shape[1] for table in tables.projections))
    most, device = max(1, min(plan.rows_per_chunk, _MOST_ENTRIES // widest)), routed.hidden.device
    if device.type != "cuda":
        return most
    tiles = options.tiles_of(routed.hidden, params).gate_up
    sizes = LayerSizes(
        routed.order.shape[0], tables.num_experts, tables.hidden, tables.width, routed.hidden.element_size(),
        tiles.rows, tiles.columns, 2 + options.has_up,
    )  # fmt: skip
    return rows_per_window(sizes, _figures(device, routed.hidden.dtype), most)


@functools.cache
def _figures(device: torch.device, dtype: torch.dtype) -> DeviceFigures:
    """Return processors and L2 size from the driver, rates from data sheets: fp32 (tf32) at half of 16 bits."""
    from memfine_fx.kernels.tiling import target_of

    properties = torch.cuda.get_device_properties(device)
    flops, bandwidth = KNOWN_RATES[target_of(device)]
    rate = flops / 2 if dtype is torch.float32 else flops
    return DeviceFigures(properties.multi_processor_count, properties.L2_cache_size, rate, bandwidth)
