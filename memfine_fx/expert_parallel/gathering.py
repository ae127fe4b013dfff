"""Custom ops that read a sharded parameter: gather the whole in forward, sum and slice its gradient in backward.

Lowering a raised region removes them from the graph. Those that are left run, and warn once. Each begins by announcing
which parameter it gathers and why, so that ranks which run the layer in rounds, or read another parameter of the same
shape, raise an error instead of waiting or taking it for theirs (`exchange`).
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.exchange import Announcement, Exchange, Place, announce, as_bytes, failing_at
from memfine_fx.expert_parallel.groups import ExpertGroup, registered
from memfine_fx.expert_parallel.placement import Placement

__all__ = ["OUTSIDE", "all_experts", "expert_of", "own_expert", "own_experts"]

OUTSIDE = "it is read outside of what memfine_fx compiled (a graph break, a recompile limit, or other code)"
"""Reason for gathering a parameter where no graph of memfine_fx gives one."""


@torch.library.custom_op(
    "memfine::all_experts",
    mutates_args=(),
    schema="(Tensor own, SymInt num_experts, str key, str name, str because) -> Tensor",
)
def all_experts(own: torch.Tensor, num_experts: int, key: str, name: str, because: str) -> torch.Tensor:
    """Return the whole expert weight [E,...], gathered from every rank's part; a collective call.

    Args:
        own: [E_local,...].
        num_experts: E.
        key: of the group.
        name: of the weight in the model.
        because: why it is gathered.

    Raises:
        RanksDisagree: other ranks do something else, or gather another parameter.
    """
    ranks = registered(key)
    place = _agreed(ranks, name, because)
    placement = Placement(num_experts, ranks.num_ranks)
    sent = as_bytes(own)
    padded = sent.new_zeros((placement.per_rank, *own.shape[1:]))
    padded[: own.shape[0]] = sent
    parts = [torch.empty_like(padded) for _ in range(ranks.num_ranks)]
    with failing_at(place, ranks.group):
        dist.all_gather(parts, padded, group=ranks.group)
    return torch.cat([part[: len(placement.owned(rank))] for rank, part in enumerate(parts)]).view(own.dtype)


@all_experts.register_fake
def _(own: torch.Tensor, num_experts: int, key: str, name: str, because: str) -> torch.Tensor:
    return own.new_empty((num_experts, *own.shape[1:]))


@torch.library.custom_op("memfine::own_experts", mutates_args=(), schema="(Tensor whole, str key) -> Tensor")
def own_experts(whole: torch.Tensor, key: str) -> torch.Tensor:
    """Return this rank's part of a gradient [E,...], summed over the group and averaged (`ExpertGroup.average`).

    A collective call.
    """
    ranks = registered(key)
    total = _summed(whole, ranks)
    owned = Placement(whole.shape[0], ranks.num_ranks).owned(ranks.rank)
    own = total[owned.start : owned.stop].clone()
    ranks.average([own])
    return own


def _summed(whole: torch.Tensor, ranks: ExpertGroup) -> torch.Tensor:
    total = whole.clone(memory_format=torch.contiguous_format)
    with failing_at(Place("a layer that was not chunked", "summing of experts' gradients"), ranks.group):
        dist.all_reduce(total, group=ranks.group)
    return total


@own_experts.register_fake
def _(whole: torch.Tensor, key: str) -> torch.Tensor:
    ranks = registered(key)
    return whole.new_empty((len(Placement(whole.shape[0], ranks.num_ranks).owned(ranks.rank)), *whole.shape[1:]))


@torch.library.custom_op(
    "memfine::expert_of",
    mutates_args=(),
    schema="(Tensor own, SymInt[] shape, int owner, str key, str name, str because) -> Tensor",
)
def expert_of(own: torch.Tensor, shape: list[int], owner: int, key: str, name: str, because: str) -> torch.Tensor:
    """Return one expert's parameter, broadcast from its owner; a collective call. See `all_experts`."""
    ranks = registered(key)
    place = _agreed(ranks, name, because)
    whole = own.clone() if ranks.rank == owner else own.new_empty(shape)
    with failing_at(place, ranks.group):
        dist.broadcast(as_bytes(whole), group=ranks.group, group_src=owner)
    return whole


@expert_of.register_fake
def _(own: torch.Tensor, shape: list[int], owner: int, key: str, name: str, because: str) -> torch.Tensor:
    return own.new_empty(shape)


@torch.library.custom_op("memfine::own_expert", mutates_args=(), schema="(Tensor whole, int owner, str key) -> Tensor")
def own_expert(whole: torch.Tensor, owner: int, key: str) -> torch.Tensor:
    """Return one expert's gradient summed over the group on its owner, an empty tensor elsewhere; a collective call."""
    ranks = registered(key)
    total = _summed(whole, ranks)
    if ranks.rank != owner:
        return whole.new_empty(0)
    ranks.average([total])
    return total


@own_expert.register_fake
def _(whole: torch.Tensor, owner: int, key: str) -> torch.Tensor:
    return torch.empty_like(whole) if registered(key).rank == owner else whole.new_empty(0)


def _save_key(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.owner, ctx.key = inputs[2], inputs[-3]


def _table_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return own_experts(grad, ctx.key), None, None, None, None


def _expert_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return own_expert(grad, ctx.owner, ctx.key), None, None, None, None, None


all_experts.register_autograd(_table_gradient, setup_context=_save_key)
expert_of.register_autograd(_expert_gradient, setup_context=_save_key)


def _agreed(ranks: ExpertGroup, name: str, because: str) -> Place:
    """Check that all ranks gather the same parameter, and return the place for error messages; a collective call."""
    place = Place(f"the layer of {name}, which was not chunked", "forward")
    announce(Exchange(ranks.group, ranks.device), Announcement(f"gathers the whole of {name}", because), place)
    _warn_of_gathering()
    return place


@functools.cache
def _warn_of_gathering() -> None:
    warnings.warn(
        "a layer reads the whole table of sharded experts, because it was not chunked (memfine_fx.report says why) "
        "or code outside the compiled graph asks for it: results are right, but all experts are gathered here",
        RuntimeWarning,
        stacklevel=2,
    )
