"""The ops that a chunked region becomes: `memfine::route`, `memfine::experts`, `memfine::experts_backward`.

They are opaque to the compiler around them: their fake implementations give shapes, their real ones run the
chunk loop on compiled functions. Chunk sizes are read at run time from the region's plan. Routing is an op of its
own so that a checkpointed region can save the index arrays instead of the experts' output.

`memfine::experts_saving` and `memfine::experts_backward_saved` stand for the same pair where the plan of the step
lets forward save something of every routed row (`passes.step.save` puts them there, after differentiation).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch

from memfine_fx.errors import DoubleBackwardError
from memfine_fx.memory.measure import span
from memfine_fx.records import ChunkPlan, SavePolicy
from memfine_fx.runtime.accumulation import gradients_to_add_to, note_idle
from memfine_fx.runtime.compiled_expert import SavingFunctions
from memfine_fx.runtime.loop import SavedRows, chunks_of, run_backward, run_forward
from memfine_fx.runtime.ranges import range_of, ranged
from memfine_fx.runtime.routing import Routed, group_params, sort_assignments
from memfine_fx.runtime.routing_hooks import note_backward, note_run
from memfine_fx.runtime.store import ExpertKernels, LiveRegion, lookup

__all__ = [
    "empty_order",
    "experts",
    "experts_backward",
    "experts_backward_saved",
    "experts_saving",
    "num_saved_rows",
    "route",
    "route_shared",
]

ItemT = TypeVar("ItemT")
_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op(
    "memfine::route",
    mutates_args=(),
    schema="(Tensor expert_index, SymInt num_experts) -> (Tensor, Tensor)",
    tags=_TAGS,
)
def route(expert_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `memfine_fx.runtime.routing.sort_assignments`."""
    return sort_assignments(expert_index, num_experts)


@route.register_fake
def _(expert_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_order(expert_index), torch.empty((num_experts + 1,), dtype=torch.int64, device="cpu")


def empty_order(expert_index: torch.Tensor) -> torch.Tensor:
    """Return the order [N] int32 of assignments [T,K], with undefined numbers; for fake implementations."""
    return expert_index.new_empty((expert_index.shape[0] * expert_index.shape[1],), dtype=torch.int32)


@torch.library.custom_op(
    "memfine::route_shared",
    mutates_args=(),
    schema="(Tensor expert_index, SymInt num_experts, int[] table_shape, str region_id) -> (Tensor, Tensor)",
    tags=_TAGS,
)
def route_shared(
    expert_index: torch.Tensor, num_experts: int, table_shape: Sequence[int], region_id: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `memfine::route` for experts on several ranks: every rank's counts come in the place of the offsets.

    Args:
        table_shape: of these. It stands in the graph, because compiled code in a cache depends on it.
    """
    region = lookup(region_id)
    assert region.exchange is not None, f"{region_id} has its experts here"
    order, offsets = sort_assignments(expert_index, num_experts)
    note_run(region, (), order, offsets)
    return order, region.exchange.share_counts(region, order, offsets, expert_index.shape[0])


@route_shared.register_fake
def _(
    expert_index: torch.Tensor, num_experts: int, table_shape: Sequence[int], region_id: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_order(expert_index), torch.empty(list(table_shape), dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "memfine::experts",
    mutates_args=(),
    schema="(Tensor hidden, Tensor? weight, Tensor order, Tensor offsets, Tensor[] params, str region_id) -> Tensor",
    tags=_TAGS,
)
def experts(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    params: list[torch.Tensor],
    region_id: str,
) -> torch.Tensor:
    """Routed rows through their experts, combined per token.

    Args:
        hidden: [T,H].
        weight: [T,K] or None.
        order, offsets: from `memfine::route`, or on the device from `memfine::route_on_device`.
        params: the parameters of the expert function, see `runtime.routing.group_params`.
        region_id: key of the live region.

    Returns:
        [T,H_out].
    """
    return _forward(_routed(hidden, weight, order, offsets, params, region_id), region_id, None)


def _routed(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    params: list[torch.Tensor],
    region_id: str,
) -> Routed:
    region = lookup(region_id)
    return Routed(hidden, weight, order, offsets, _grouped(params, region), region.top_k)


def _forward(routed: Routed, region_id: str, saved: SavedRows | None) -> torch.Tensor:
    region, num_tokens = lookup(region_id), routed.num_tokens
    name = f"{region.name or region_id} forward"
    if region.exchange is not None:
        with span(f"forward {region_id}"), range_of(name):
            return region.exchange.forward(region, routed, saved)
    note_run(region, routed.params, routed.order, routed.offsets)
    plan = region.plan_for(num_tokens)
    kernels = region.kernels_for(routed, saved)
    if kernels is not None:
        return _forward_in_kernels(kernels, region, routed, plan, name, saved)
    routed = routed.on_host()
    region.check_ids(routed.order, routed.offsets)
    chunks = chunks_of(routed, region.compiled_expert, plan, region.tuner, saved)
    region.plan, region.num_tokens, region.num_chunks = plan, num_tokens, len(chunks)
    region.largest_chunk = max((chunk.num_rows for chunk in chunks), default=0)
    has_shared = "shared" in region.compiled_expert.param_kinds
    region.stages_gradients = has_shared or any(chunk.is_part for chunk in chunks)
    region.num_steps += 1
    region.loads.note(routed.offsets)
    lower = partial(region.lower, num_tokens)
    with span(f"forward {region_id}"), range_of(name):
        return run_forward(routed, region.compiled_expert, ranged(chunks, name), region.out_dtype, lower, saved)


def _forward_in_kernels(
    kernels: ExpertKernels, region: LiveRegion, routed: Routed, plan: ChunkPlan, name: str, saved: SavedRows | None
) -> torch.Tensor:
    region.plan, region.num_tokens = plan, routed.num_tokens
    region.num_steps += 1
    if routed.offsets.device.type == "cpu":
        region.check_ids(routed.order, routed.offsets)
        region.loads.note(routed.offsets)
    else:
        region.loads.note_later(routed.offsets, None if region.drops_larger else routed.order.shape[0])
    with span(f"forward {region.region_id}"), range_of(name):
        return kernels.forward(region, routed, plan, saved)


def _grouped(flat: Sequence[ItemT], region: LiveRegion) -> list[tuple[ItemT, ...]]:
    return group_params(flat, region.compiled_expert.param_kinds, region.num_experts)


@experts.register_fake
def _(hidden: torch.Tensor, *others: Any) -> torch.Tensor:
    return _empty_output(hidden, region_id=others[-1])


def _empty_output(hidden: torch.Tensor, region_id: str) -> torch.Tensor:
    region = lookup(region_id)
    return hidden.new_empty((hidden.shape[0], region.compiled_expert.out_width), dtype=region.out_dtype)


@torch.library.custom_op(
    "memfine::experts_backward",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor hidden, Tensor? weight, Tensor order, Tensor offsets, Tensor[] params, str region_id,"
        " bool[] wanted) -> Tensor[]"
    ),
    tags=_TAGS,
)
def experts_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    params: list[torch.Tensor],
    region_id: str,
    wanted: list[bool],
) -> list[torch.Tensor]:
    """Gradients of what is wanted (hidden, weight, then each parameter), recomputing chunk by chunk."""
    return _backward(grad, _routed(hidden, weight, order, offsets, params, region_id), region_id, wanted, None)


def _backward(
    grad: torch.Tensor, routed: Routed, region_id: str, wanted: list[bool], saved: SavedRows | None
) -> list[torch.Tensor]:
    region = lookup(region_id)
    wanted_params = _grouped(wanted[2:], region)
    name = f"{region.name or region_id} backward"
    note_backward(region, routed.params)
    if region.exchange is not None:
        with span(f"backward {region_id}"), range_of(name):
            return region.exchange.backward(region, grad, routed, (wanted[0], wanted[1]), wanted_params, saved)
    plan = region.plan_for(routed.num_tokens)
    existing_grads = gradients_to_add_to(region_id, [param for group in routed.params for param in group], wanted)
    region.num_added = sum(gradient is not None for gradient in existing_grads)
    note_idle(region_id, region.idle_params(routed.offsets), wanted)
    kernels = region.kernels_for(routed, saved)
    if kernels is not None:
        with span(f"backward {region_id}"), range_of(name):
            return kernels.backward(grad, region, routed, plan, wanted, saved, existing_grads)
    routed = routed.on_host()
    chunks = ranged(chunks_of(routed, region.compiled_expert, plan, region.tuner, saved, is_new_step=False), name)
    lower = partial(region.lower, routed.num_tokens)
    rows_and_weight, onto = (wanted[0], wanted[1]), _grouped(existing_grads, region)
    with span(f"backward {region_id}"), range_of(name):
        return run_backward(
            grad, routed, region.compiled_expert, chunks, rows_and_weight, wanted_params, lower, saved, onto=onto
        )


@experts_backward.register_fake
def _empty_gradients(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    params: list[torch.Tensor],
    region_id: str,
    wanted: list[bool],
    *saved_as: Any,
) -> list[torch.Tensor]:
    like = [hidden, weight, *params]
    contiguous = [True, True, *[False] * len(params)]
    return [
        tensor.new_empty(tensor.shape) if is_contiguous else torch.empty_like(tensor)
        for tensor, is_wanted, is_contiguous in zip(like, wanted, contiguous, strict=True)
        if is_wanted and tensor is not None
    ]


@torch.library.custom_op(
    "memfine::num_saved_rows", mutates_args=(), schema="(Tensor order, str region_id) -> Tensor", tags=_TAGS
)
def num_saved_rows(order: torch.Tensor, region_id: str) -> torch.Tensor:
    """Return of how many routed rows a region saves something in this run, as the plan of the run says.

    Args:
        order: [N], see `experts`.
        region_id: key of the live region.

    Returns:
        [] int64, on the CPU.
    """
    region, rows = lookup(region_id), order.shape[0]
    return torch.tensor(min(rows, region.plan_for(rows // region.top_k).num_saved_rows))


@num_saved_rows.register_fake
def _(order: torch.Tensor, region_id: str) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "memfine::experts_saving",
    mutates_args=(),
    schema=(
        "(Tensor hidden, Tensor? weight, Tensor order, Tensor offsets, Tensor[] params, str region_id, bool[] wanted,"
        " str policy, SymInt num_rows) -> Tensor[]"
    ),
    tags=_TAGS,
)
def experts_saving(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    params: list[torch.Tensor],
    region_id: str,
    wanted: list[bool],
    policy: str,
    num_rows: int,
) -> list[torch.Tensor]:
    """Return the output of `memfine::experts` and the saved tensors of routed rows, [M,...] each in expert order.

    Where experts live on several ranks, rows that came are saved, as many as this rank has routed rows itself.

    Args:
        wanted: which gradients backward will want, as in `memfine::experts_backward`.
        policy: a `records.SavePolicy` other than "nothing".
        num_rows: M, from `memfine::num_saved_rows`: the first so many rows in expert order are saved; N where experts
            live on several ranks.
    """
    routed = _routed(hidden, weight, order, offsets, params, region_id)
    saved = _room(hidden, weight, region_id, wanted, policy, num_rows)
    return [_forward(routed, region_id, saved.of_rows(order.shape[0])), *saved.tensors]


@experts_saving.register_fake
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    params: list[torch.Tensor],
    region_id: str,
    wanted: list[bool],
    policy: str,
    num_rows: int,
) -> list[torch.Tensor]:
    saved = _room(hidden, weight, region_id, wanted, policy, num_rows)
    return [_empty_output(hidden, region_id), *saved.tensors]


@torch.library.custom_op(
    "memfine::experts_backward_saved",
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor hidden, Tensor? weight, Tensor order, Tensor offsets, Tensor[] params, str region_id,"
        " bool[] wanted, Tensor[] saved, str policy) -> Tensor[]"
    ),
    tags=_TAGS,
)
def experts_backward_saved(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    params: list[torch.Tensor],
    region_id: str,
    wanted: list[bool],
    saved: list[torch.Tensor],
    policy: str,
) -> list[torch.Tensor]:
    """As `memfine::experts_backward`, with the tensors that `memfine::experts_saving` saved."""
    num_rows = saved[0].shape[0] if lookup(region_id).decides_saved_rows else order.shape[0]
    saved_rows = SavedRows(_saving(region_id, wanted, policy), saved, num_rows).of_rows(order.shape[0])
    return _backward(grad, _routed(hidden, weight, order, offsets, params, region_id), region_id, wanted, saved_rows)


experts_backward_saved.register_fake(_empty_gradients)


def _room(
    hidden: torch.Tensor,
    weight: torch.Tensor | None,
    region_id: str,
    wanted: list[bool],
    policy: str,
    num_rows: int,
) -> SavedRows:
    saved = SavedRows.empty(_saving(region_id, wanted, policy), hidden, num_rows)
    exchange = lookup(region_id).exchange
    if exchange is None:
        return saved
    return SavedRows(saved.functions, [*exchange.room(hidden, weight, num_rows), *saved.tensors])


def _saving(region_id: str, wanted: list[bool], policy: str) -> SavingFunctions:
    region = lookup(region_id)
    wanted_params = map(any, _grouped(wanted[2:], region))
    compiled_expert = region.compiled_expert.saving(cast("SavePolicy", policy), (wanted[0], wanted[1], *wanted_params))
    assert compiled_expert is not None, f"{region_id} has nothing to save as {policy!r}"
    return compiled_expert


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    hidden, weight, order, offsets, params, region_id = inputs
    ctx.save_for_backward(hidden, *([] if weight is None else [weight]), order, offsets, *params)
    ctx.has_weight = weight is not None
    ctx.region_id = region_id


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    hidden = saved.pop(0)
    weight = saved.pop(0) if ctx.has_weight else None
    order, offsets, *params = saved
    needs_params = ctx.needs_input_grad[4]
    wanted = [ctx.needs_input_grad[0], ctx.has_weight and ctx.needs_input_grad[1], *needs_params]
    grads = iter(experts_backward(grad, hidden, weight, order, offsets, params, ctx.region_id, wanted))
    chosen = [next(grads) if is_wanted else None for is_wanted in wanted]
    # A graph that is traced returns all of them, and leaves them out when it runs.
    for place in lookup(ctx.region_id).idle_params(offsets) if type(offsets) is torch.Tensor else ():
        chosen[2 + place] = None
    return chosen[0], chosen[1], None, None, chosen[2:], None


def _refuse_second_derivative(ctx: Any, *grads: Any) -> None:
    raise DoubleBackwardError(
        "double backward through a chunked MoE region is not supported: its backward recomputes chunk by chunk "
        "and is not differentiable. Compute second derivatives on the model without memfine_fx."
    )


experts.register_autograd(_differentiate, setup_context=_save)
experts_backward.register_autograd(_refuse_second_derivative)
