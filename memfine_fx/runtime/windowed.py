"""A region's step by the GPU kernels, where they are asked for and know its experts' form."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.bodies import KeptTensor
from memfine_fx.runtime.halving import run_halved
from memfine_fx.runtime.kernels.launches import has_triton
from memfine_fx.runtime.kernels.tables import KernelForm, ListTable, Param, num_projections_of, standing
from memfine_fx.runtime.kernels.window_size import KNOWN_RATES, DeviceFigures, LayerSizes, rows_per_window
from memfine_fx.runtime.kernels.windows import most_rows
from memfine_fx.runtime.loop import Kept
from memfine_fx.runtime.params import group_params
from memfine_fx.runtime.routed import Routed
from memfine_fx.runtime.routing import check_rows, sent
from memfine_fx.runtime.store import LiveRegion

if TYPE_CHECKING:  # these need Triton
    from memfine_fx.runtime.kernels.layer import Gradients, LayerOptions, Products
    from memfine_fx.runtime.kernels.sorting import Routing
    from memfine_fx.runtime.kernels.tiling import LayerTiles
    from memfine_fx.runtime.kernels.tuning import LayerKind

__all__ = [
    "can_keep",
    "can_run",
    "is_taken",
    "run_backward",
    "run_forward",
    "runs_by_default",
    "sort_on_device",
    "why_bodies_after_timing",
]

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

_DEVICES = ("cuda",)
_TIMED = ("cuda",)  # devices on which tiles are chosen by time: not in the interpreter
_MEASURED = ("sm_90",)  # benchmarks/results/gpu_model.json
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_ENTRIES = 2**31 - 1


def can_run(form: KernelForm | None, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels know experts of this form, on tensors of these devices and dtypes.

    Tables that are made are frozen, though not their adapters.

    Args:
        tensors: tokens and parameters.
    """
    if form is None or not all(one.device.type in _DEVICES for one in tensors):
        return False
    hidden, *params = tensors
    if form.is_list:
        num_experts = len(params) // len(form.positions)
        groups = [params[first : first + num_experts] for first in range(0, len(params), num_experts)]
        are_alike = all(len({(one.shape, one.stride(), one.dtype) for one in group}) == 1 for group in groups)
        are_one_dtype = len({one.dtype for one in params}) == 1  # of which kernels read all addresses
        return are_alike and are_one_dtype and all(one.dtype in _DTYPES for one in tensors) and has_triton()
    positions = form.made
    made = [params[position] for position in positions]
    others = [hidden, *(one for position, one in enumerate(params) if position not in positions)]
    own = [params[position] for position in form.positions[: form.num_own]]
    are_known = all(one.dtype in _DTYPES for one in others) and not any(one.requires_grad for one in own if made)
    return are_known and all(one.is_contiguous() for one in made) and has_triton()


def runs_by_default(form: KernelForm, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels run, where nobody asked, a region that they know: as far as models were measured in them.

    Adapters may be in fp32, as PEFT makes them beside tables in 16 bits.

    Args:
        tensors: as for `can_run`.
    """
    from memfine_fx.runtime.kernels.tiling import target_of

    if form.is_list or any(target_of(one.device) not in _MEASURED for one in tensors):
        return False
    hidden, *params = tensors
    own = [params[position] for position in form.positions[: form.num_own]]
    return all(one.element_size() == 2 for one in (hidden, *own))


def can_keep(form: KernelForm, kept: Sequence[KeptTensor], dtype: torch.dtype) -> bool:
    """Whether what bodies would keep is room for the kernels' products, and for adapters' narrow rows at most.

    Bodies keep these products at least, so that as many wide tensors as there are projections are they.

    Args:
        dtype: of the rows.
    """
    are_rows = all(len(one.shape) == 1 and one.dtype is dtype for one in kept)
    return are_rows and len(_wide(form, kept)) == num_projections_of(form.layout)


def _wide(form: KernelForm, kept: Sequence[KeptTensor]) -> list[int]:
    """Which of what is kept are not narrow rows of adapters, that the kernels leave unwritten and make again."""
    ranks = [adapter.rank for adapter in form.adapters if adapter is not None]
    return [place for place, one in enumerate(kept) if one.shape[0] not in ranks]


def is_taken(region: LiveRegion, routed: Routed, kept: Kept | None) -> bool:
    """Whether the kernels run this step of a region: nothing is kept, or their products.

    NOTE: forward and backward must answer alike, so that nothing here depends on what may change between them.
    """
    if not region.uses_kernels:  # the form was found when the region was lowered, or is not wanted
        return False
    form = region.bodies.kernel_form
    if form is None or (kept is not None and not can_keep(form, kept.bodies.kept, routed.hidden.dtype)):
        return False
    return can_run(form, [routed.hidden, *(tensor for tensors in routed.params for tensor in tensors)])


def _products(kept: Kept, form: KernelForm) -> Products:
    """Gate's and up's products in what is kept, [M,F] each; the same where there is no up projection.

    The kernels write the room that the bodies would, each in its own way: with biases, and gate before up where tables
    alternate. Only their own backward reads it.
    """
    tensors = [kept.tensors[place] for place in _wide(form, kept.bodies.kept)]
    if not form.has_up:
        (both,) = tensors
        return both, both
    if num_projections_of(form.layout) == 2:
        gate, up = tensors
    else:
        (both,) = tensors
        gate, up = both.chunk(2, dim=1)
    return gate, up


def sort_on_device(expert_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `routing.sort_assignments`, but [E+1] int32 offsets on the device; rows behind the last one are undefined."""
    from memfine_fx.runtime.kernels.sorting import sort_assignments

    check_rows(expert_index.numel())
    routing = sort_assignments(expert_index, num_experts)
    return routing.order, routing.offsets


def run_forward(region: LiveRegion, routed: Routed, plan: ChunkPlan, kept: Kept | None) -> torch.Tensor:
    """Combined outputs, [T,H] of the region's dtype; products go into what is kept.

    Raises:
        ChunkOutOfMemory: memory ran out in windows of a single row.
    """
    from memfine_fx.runtime.kernels import layer

    routing, options, params, products = _arguments(region, routed, plan, kept)

    def run(rows: int) -> torch.Tensor:
        sized = replace(options, rows_per_window=rows)
        windows = layer.layer_windows(routing, sized, products)
        region.num_chunks, region.largest_chunk = len(windows), most_rows(windows)
        region.stages_gradients = len(windows) > 1
        hidden, weight = routed.hidden.contiguous(), _flat_weight(routed)
        return layer.run_forward(hidden, weight, routing, params, sized, region.out_dtype, products)[0]

    return _halved(run, region, routed, options, params)


def run_backward(
    grad: torch.Tensor,
    region: LiveRegion,
    routed: Routed,
    plan: ChunkPlan,
    wanted: Sequence[bool],
    kept: Kept | None,
    onto: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Gradients of what is wanted, in the order hidden, weight, parameters.

    Args:
        onto: of each parameter a gradient that is there and is added to, and returned as it is then.

    Raises:
        ChunkOutOfMemory: memory ran out in windows of a single row, or after something was added to.
    """
    from memfine_fx.runtime.kernels import layer

    routing, options, params, products = _arguments(region, routed, plan, kept)
    form = region.bodies.kernel_form
    assert form is not None
    kinds, num_experts = region.bodies.param_kinds, region.num_experts
    groups = group_params(wanted[2:], kinds, num_experts)
    asked = [wanted[0], wanted[1], *(any(groups[position]) for position in form.positions)]
    of_each = group_params(onto, kinds, num_experts)
    there = [of_each[position] if form.is_list else of_each[position][0] for position in form.positions]

    def run(rows: int) -> Gradients:
        windows = replace(options, rows_per_window=rows)
        hidden, weight = routed.hidden.contiguous(), _flat_weight(routed)
        return layer.run_backward(grad, hidden, weight, routing, params, products, windows, asked, there)

    found = _halved(run, region, routed, options, params)
    weight = None if found.weight is None else found.weight.view(-1, routed.top_k)
    by_position = dict(zip(form.positions, found.params, strict=True))
    gradients = [found.hidden, weight]
    for position, are_wanted in enumerate(groups):
        gradient = by_position[position]
        if gradient is None or isinstance(gradient, torch.Tensor):
            gradients.append(gradient)
        else:
            gradients += [one for one, is_wanted in zip(gradient, are_wanted, strict=True) if is_wanted]
    return [gradient for gradient in gradients if gradient is not None]


def _halved(
    run: Callable[[int], ResultT],
    region: LiveRegion,
    routed: Routed,
    options: LayerOptions,
    params: Sequence[Param],
) -> ResultT:
    """A pass of a layer, in smaller windows where memory runs out, in this step and in those to come."""

    def needs() -> list[tuple[str, int]]:
        return [("row of a window", 3 * options.tables_of(params).width * routed.hidden.element_size())]

    result, limit = run_halved(run, options.rows_per_window, needs=needs)
    if limit is not None:
        region.lower(routed.num_tokens, limit)
    return result


def _flat_weight(routed: Routed) -> torch.Tensor | None:
    return None if routed.flat_weight is None else routed.flat_weight.contiguous()


def _arguments(
    region: LiveRegion, routed: Routed, plan: ChunkPlan, kept: Kept | None
) -> tuple[Routing, LayerOptions, list[Param], Products | None]:
    from memfine_fx.runtime.kernels.layer import LayerOptions
    from memfine_fx.runtime.kernels.sorting import Routing

    form = region.bodies.kernel_form
    assert form is not None
    offsets = routed.offsets
    if offsets.device != routed.hidden.device or offsets.dtype is not torch.int32:
        offsets = sent(offsets.to(torch.int32), routed.hidden.device)
    # The inverse map is for deterministic sums only.
    routing = Routing(routed.order, routed.order, offsets, routed.top_k)
    of_each = [routed.params[position] for position in form.positions]
    params: list[Param] = [ListTable.of(one) if form.is_list else one[0] for one in of_each]
    products = None if kept is None else _products(kept, form)
    options = LayerOptions(
        plan.rows_per_chunk, layout=form.layout, activation=form.activation, has_bias=form.has_bias,
        keeps_products=products is not None, precision=_precision(), sources=form.sources, adapters=form.adapters,
        tiles=_tiles(form, routed.hidden, params, routed.top_k, measures=False),
    )  # fmt: skip
    return routing, replace(options, rows_per_window=_rows(routed, params, options, plan)), params, products


def _precision() -> str:
    """Of products of fp32, as torch multiplies them."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def why_bodies_after_timing(
    form: KernelForm, hidden: torch.Tensor, params: Sequence[torch.Tensor], top_k: int, *, only_if_faster: bool
) -> str:
    """Time the kernels' tiles on a CUDA device for such a layer, unless that was done; see `kernels.tuning`.

    Returns:
        Why they shall not run there, "" where they shall. Where none can, a warning says so.

    Args:
        form: of the layer.
        hidden: its rows, which may be fake.
        params: of its expert function, in that function's order; may be fake.
        top_k: K.
        only_if_faster: whether they shall not where torch's grouped products took less time.
    """
    from memfine_fx.runtime.kernels.tuning import KernelsDoNotRun, times_of

    if form.is_list:
        return ""
    given = [params[position] for position in form.positions]
    try:
        _tiles(form, hidden, given, top_k, measures=True)
    except KernelsDoNotRun as error:
        _LOG.warning("experts keep their bodies, because GPU kernels do not run here: %s", error)
        return "the kernels do not run here"
    times = times_of(_kind(form, hidden, given, top_k), hidden.device) if only_if_faster else None
    if times is None or times.grouped is None or times.kernels <= times.grouped:
        return ""
    return f"grouped products took {1e3 * times.grouped:.2f} ms of a timed layer, the kernels {1e3 * times.kernels:.2f}"


def _kind(form: KernelForm, hidden: torch.Tensor, params: Sequence[Param], top_k: int) -> LayerKind:
    """Of the layer without adapters, whose kernels' tiles they share."""
    from memfine_fx.runtime.kernels.tuning import kind_of

    own = list(map(standing, params[: form.num_own]))
    return kind_of(form.layout, form.activation, form.has_bias, _precision(), hidden, own, top_k)


def _tiles(
    form: KernelForm, hidden: torch.Tensor, params: Sequence[Param], top_k: int, *, measures: bool
) -> LayerTiles | None:
    """Those that were timed; None where none were, which are those that stand in the code."""
    from memfine_fx.runtime.kernels.tuning import tune, tuned

    if hidden.device.type not in _TIMED or form.sources or form.is_list:
        return None
    kind = _kind(form, hidden, params, top_k)
    return tune(kind, hidden.device) if measures else tuned(kind, hidden.device)


def _rows(routed: Routed, params: Sequence[Param], options: LayerOptions, plan: ChunkPlan) -> int:
    """R by the device's figures, at most the plan's and what 32 bits count; the most where there are no figures."""
    tables = options.tables_of(params)
    widest = max(tables.hidden, *(one.shape[1] for one in tables.projections))
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
    """Units and L2 as the driver says, rates as data sheets do; fp32 at half of 16 bits, as tf32 is."""
    from memfine_fx.runtime.kernels.tiling import target_of

    told = torch.cuda.get_device_properties(device)
    flops, bandwidth = KNOWN_RATES[target_of(device)]
    rate = flops / 2 if dtype is torch.float32 else flops
    return DeviceFigures(told.multi_processor_count, told.L2_cache_size, rate, bandwidth)
