"""The ops that a read of a sharded parameter is: the whole, gathered, and its gradient, summed and cut.

Lowering a raised region takes them out of the graph. What is left of them runs, and says so once.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.exchange import Place, failing_at
from memfine_fx.expert_parallel.groups import registered
from memfine_fx.expert_parallel.placement import Placement

__all__ = ["all_experts", "expert_of", "own_expert", "own_experts"]


@torch.library.custom_op(
    "memfine::all_experts", mutates_args=(), schema="(Tensor own, SymInt num_experts, str key) -> Tensor"
)
def all_experts(own: torch.Tensor, num_experts: int, key: str) -> torch.Tensor:
    """The whole table [E,...] from every rank's part; a collective call."""
    _warn_of_gathering()
    ranks = registered(key)
    placement = Placement(num_experts, ranks.num_ranks)
    padded = own.new_zeros((placement.per_rank, *own.shape[1:]))
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in range(ranks.num_ranks)]
    with failing_at(Place("a layer that was not chunked", "gathering of experts"), ranks.group):
        dist.all_gather(parts, padded, group=ranks.group)
    return torch.cat([part[: len(placement.owned(rank))] for rank, part in enumerate(parts)])


@all_experts.register_fake
def _(own: torch.Tensor, num_experts: int, key: str) -> torch.Tensor:
    return own.new_empty((num_experts, *own.shape[1:]))


@torch.library.custom_op("memfine::own_experts", mutates_args=(), schema="(Tensor whole, str key) -> Tensor")
def own_experts(whole: torch.Tensor, key: str) -> torch.Tensor:
    """This rank's part of a gradient [E,...] summed over the group, see `ExpertGroup.average`; a collective call."""
    ranks = registered(key)
    total = whole.clone(memory_format=torch.contiguous_format)
    with failing_at(Place("a layer that was not chunked", "summing of experts' gradients"), ranks.group):
        dist.all_reduce(total, group=ranks.group)
    owned = Placement(whole.shape[0], ranks.num_ranks).owned(ranks.rank)
    own = total[owned.start : owned.stop].clone()
    ranks.average([own])
    return own


@own_experts.register_fake
def _(whole: torch.Tensor, key: str) -> torch.Tensor:
    ranks = registered(key)
    return whole.new_empty((len(Placement(whole.shape[0], ranks.num_ranks).owned(ranks.rank)), *whole.shape[1:]))


@torch.library.custom_op(
    "memfine::expert_of", mutates_args=(), schema="(Tensor own, SymInt[] shape, int owner, str key) -> Tensor"
)
def expert_of(own: torch.Tensor, shape: list[int], owner: int, key: str) -> torch.Tensor:
    """One expert's parameter from its owner; a collective call."""
    _warn_of_gathering()
    ranks = registered(key)
    whole = own.clone() if ranks.rank == owner else own.new_empty(shape)
    with failing_at(Place("a layer that was not chunked", "gathering of experts"), ranks.group):
        dist.broadcast(whole, group=ranks.group, group_src=owner)
    return whole


@expert_of.register_fake
def _(own: torch.Tensor, shape: list[int], owner: int, key: str) -> torch.Tensor:
    return own.new_empty(shape)


@torch.library.custom_op("memfine::own_expert", mutates_args=(), schema="(Tensor whole, int owner, str key) -> Tensor")
def own_expert(whole: torch.Tensor, owner: int, key: str) -> torch.Tensor:
    """One expert's gradient summed over the group on its owner, nothing elsewhere; a collective call."""
    ranks = registered(key)
    total = whole.clone(memory_format=torch.contiguous_format)
    with failing_at(Place("a layer that was not chunked", "summing of experts' gradients"), ranks.group):
        dist.all_reduce(total, group=ranks.group)
    if ranks.rank != owner:
        return whole.new_empty(0)
    ranks.average([total])
    return total


@own_expert.register_fake
def _(whole: torch.Tensor, owner: int, key: str) -> torch.Tensor:
    return torch.empty_like(whole) if registered(key).rank == owner else whole.new_empty(0)


def _save_key(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.rest = inputs[2:]


def _table_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (key,) = ctx.rest
    return own_experts(grad, key), None, None


def _expert_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    owner, key = ctx.rest
    return own_expert(grad, owner, key), None, None, None


all_experts.register_autograd(_table_gradient, setup_context=_save_key)
expert_of.register_autograd(_expert_gradient, setup_context=_save_key)

_has_warned = False


def _warn_of_gathering() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "a layer reads the whole table of sharded experts, because it was not chunked (memfine_fx.report says why) "
            "or code outside the compiled graph asks for it: results are right, but all experts are gathered here",
            RuntimeWarning,
            stacklevel=2,
        )
