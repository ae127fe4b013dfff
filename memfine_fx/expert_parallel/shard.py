"""Experts' parameters of a model cut in place, so that the model still traces as the whole one.

Each parameter keeps its object and its name and holds this rank's experts. Read as an attribute of its module it is the
whole table [E,...], as the result of `memfine::all_experts(slice)`; of a list of experts' modules, every rank keeps the
parameters of its own and the others are empty until read (`memfine::expert_of`). The class of such a module becomes a
subclass with the same name.

So nothing that is captured changes, and no detection has to be proved right: lowering a raised region takes the slice
and the op never runs; anywhere else it runs and gathers what was asked for, forward and backward.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memfine_fx.config import Config
from memfine_fx.errors import ConfigError, RanksDisagree
from memfine_fx.expert_parallel.exchange import Place, failing_at
from memfine_fx.expert_parallel.groups import ExpertGroup, registered
from memfine_fx.expert_parallel.placement import Placement

__all__ = ["ShardedParameter", "shard_experts", "sharded_parameters"]

_ATTRIBUTE = "_memfine_sharded"


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter of which this rank holds a part.

    Args:
        module: that owns it.
        name: in the module.
        shape: of the whole: [E,...] of a table, or one expert's own.
        placement: of the experts.
        expert: whose it is, for a parameter of one expert's module; None for a table.
        ranks: that share the experts.
    """

    module: nn.Module
    name: str
    shape: tuple[int, ...]
    placement: Placement
    expert: int | None
    ranks: ExpertGroup

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    @property
    def is_here(self) -> bool:
        """Whether this rank holds any of it."""
        owned = self.placement.owned(self.ranks.rank)
        return len(owned) > 0 if self.expert is None else self.expert in owned

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole."""
        owned = self.placement.owned(self.ranks.rank)
        if self.expert is None:
            return whole[owned.start : owned.stop]
        return whole if self.expert in owned else whole.new_empty(0)


def shard_experts(model: nn.Module, ranks: ExpertGroup, config: Config | None = None) -> list[ShardedParameter]:
    """Keep this rank's experts of a model and give the others up, in place; a collective call.

    Tables are parameters of three dimensions or more, with the biases beside them, that share their first size in a
    module whose class or path names experts or MoE; lists of experts are a ModuleList or ModuleDict called so, of equal
    members. Every rank must hold the same whole model, as for DistributedDataParallel. DDP is told to leave the experts
    alone (`_ddp_params_and_buffers_to_ignore`).

    Args:
        model: whole, the same on every rank.
        ranks: that share the experts.
        config: compared between ranks; the memory budget may differ.

    Raises:
        ConfigError: no experts were found, or the model is sharded already.
        RanksDisagree: the ranks' models or configs differ; the message says in what.
    """
    if sharded_parameters(model):
        raise ConfigError("this model's experts are sharded already")
    found = [*_tables(model, ranks), *_lists(model, ranks)]
    _check_same(_described(model, found, config or Config()), ranks)
    if not found:
        raise ConfigError(
            "no experts were found to shard: expected parameters [E,...] in a module, or a ModuleList of experts, "
            "whose class or path holds 'expert' or 'moe'"
        )
    by_module: dict[nn.Module, list[ShardedParameter]] = {}
    for one in found:
        by_module.setdefault(one.module, []).append(one)
    done: set[int] = set()
    for module, owned in by_module.items():
        for one in owned:
            if id(one.parameter) not in done:
                done.add(id(one.parameter))
                one.parameter.grad = None
                one.parameter.data = one.own(one.parameter.data).clone()
        _make_whole_when_read(module, owned)
        object.__setattr__(module, _ATTRIBUTE, tuple(owned))
    names = [name for name, parameter in model.named_parameters() if id(parameter) in done]
    ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names]
    object.__setattr__(model, "_ddp_params_and_buffers_to_ignore", ignored)
    return found


def sharded_parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """Name in the model -> each sharded parameter."""
    return {
        f"{path}.{one.name}" if path else one.name: one
        for path, module in model.named_modules()
        for one in getattr(module, _ATTRIBUTE, ())
    }


def _tables(model: nn.Module, ranks: ExpertGroup) -> Iterator[ShardedParameter]:
    for path, module in model.named_modules():
        if not _names_experts(f"{path} {type(module).__name__}"):
            continue
        own = {name: one for name, one in module._parameters.items() if one is not None}
        sizes = {one.shape[0] for one in own.values() if one.ndim >= 3}
        if len(sizes) != 1 or isinstance(module, nn.modules.conv._ConvNd):
            continue
        (num_experts,) = sizes
        for name, one in own.items():
            if one.shape[0] == num_experts and (one.ndim >= 3 or (one.ndim == 2 and "bias" in name)):
                yield ShardedParameter(
                    module, name, tuple(one.shape), Placement(num_experts, ranks.num_ranks), None, ranks
                )


def _lists(model: nn.Module, ranks: ExpertGroup) -> Iterator[ShardedParameter]:
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or "expert" not in path.rpartition(".")[2].lower():
            continue
        members = list(module.values() if isinstance(module, nn.ModuleDict) else module)
        layouts = {tuple((name, one.shape) for name, one in member.named_parameters()) for member in members}
        if len(members) < 2 or len(layouts) != 1:
            continue
        placement = Placement(len(members), ranks.num_ranks)
        for expert, member in enumerate(members):
            for child in member.modules():
                for name, one in child._parameters.items():
                    if one is not None:
                        yield ShardedParameter(child, name, tuple(one.shape), placement, expert, ranks)


def _names_experts(text: str) -> bool:
    return "expert" in text.lower() or "moe" in text.lower()


def _make_whole_when_read(module: nn.Module, owned: Sequence[ShardedParameter]) -> None:
    cls = type(module)
    reads = {one.name: property(_reader(one)) for one in owned}
    module.__class__ = type(cls.__name__, (cls,), {**reads, "__module__": cls.__module__, "__doc__": cls.__doc__})


def _reader(one: ShardedParameter) -> Any:
    name, key = one.name, one.ranks.key
    if one.expert is None:
        num_experts = one.placement.num_experts

        def read_table(self: nn.Module) -> torch.Tensor:
            whole: torch.Tensor = torch.ops.memfine.all_experts.default(self._parameters[name], num_experts, key)
            return whole

        return read_table
    owner, shape = one.placement.owner(one.expert), list(one.shape)

    def read_one(self: nn.Module) -> torch.Tensor:
        whole: torch.Tensor = torch.ops.memfine.expert_of.default(self._parameters[name], shape, owner, key)
        return whole

    return read_one


def _described(model: nn.Module, found: Sequence[ShardedParameter], config: Config) -> dict[str, str]:
    """What every rank of the group must share, in words, by name."""
    sharded = {id(one.parameter) for one in found}
    described = {
        f"parameter {name}": f"{list(one.shape)} {one.dtype}"
        f"{'' if one.requires_grad else ', frozen'}{', sharded' if id(one) in sharded else ''}"
        for name, one in model.named_parameters()
    }
    for field in dataclasses.fields(config):
        if field.name != "memory_budget":
            described[f"Config.{field.name}"] = repr(getattr(config, field.name))
    return described


def _check_same(own: dict[str, str], ranks: ExpertGroup) -> None:
    everyone: list[Any] = [None] * ranks.num_ranks
    with failing_at(Place("the model", "sharding"), ranks.group):
        dist.all_gather_object(everyone, own, group=ranks.group)
    for rank, other in enumerate(everyone):
        for name in {**everyone[0], **other}:
            here, there = everyone[0].get(name, "absent"), other.get(name, "absent")
            if here != there:
                raise RanksDisagree(
                    f"ranks of the expert parallel group differ: {name} is {here} on rank 0 and {there} on rank {rank}"
                )


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
