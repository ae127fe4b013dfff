"""Shard the experts' parameters of a model in place, so that the model still traces as the whole one.

Each parameter keeps its object and its name and holds this rank's experts. Read as an attribute of its module it is the
whole weight [E,...], as the result of `memfine::all_experts(slice)`; of a list of experts' modules, every rank holds
the parameters of its own and the others are empty until read (`memfine::expert_of`). The class of such a module becomes
a subclass with the same name.

So nothing that is captured changes, and no detection has to be proved right: lowering a raised region takes the slice
and the op never runs; anywhere else it runs and gathers what was asked for, forward and backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from memfine_fx.compat.bitsandbytes import packed_experts, readable
from memfine_fx.compat.nn import IGNORED_BY_DDP, ignore_in_ddp, own_parameters
from memfine_fx.config import Config, parse_budget
from memfine_fx.errors import ConfigError, MemfineError, RanksDisagree
from memfine_fx.expert_parallel.adapters import EXPERTS_FIRST, adapters_of, add_by_slices
from memfine_fx.expert_parallel.bandwidth import measure_bandwidth
from memfine_fx.expert_parallel.clones import bytes_of_clones
from memfine_fx.expert_parallel.exchange import Exchange, Place, failing_at, gather_rows, widen
from memfine_fx.expert_parallel.gathering import OUTSIDE
from memfine_fx.expert_parallel.groups import ExpertGroup
from memfine_fx.expert_parallel.parameters import ShardedParameter, experts_first, speak_dtensor, with_experts_back
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.memory.machine import host_bytes

__all__ = ["shard_experts", "sharded_parameters"]

_ATTRIBUTE = "_memfine_sharded"
_MOST_SLOTS = 2
_SLOTS_PART = 20
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def shard_experts(model: nn.Module, ranks: ExpertGroup, config: Config | None = None) -> list[ShardedParameter]:
    """Shard the experts of a model in place: keep this rank's and free the others; a collective call.

    Expert weights are parameters of three dimensions or more, with the biases beside them, that share their first size
    in a module whose class or path names experts or MoE; lists of experts are a ModuleList or ModuleDict called so, of
    equal members. Adapters of PEFT on expert weights are cut like these. Every rank must hold the same whole model, as
    for DistributedDataParallel. DDP ignores the experts.

    Args:
        model: whole, the same on every rank.
        ranks: that share the experts.
        config: compared between ranks; the memory budget may differ. Where `ranks` leave it open, the smallest decides
            how many slots there are for clones of hot experts.

    Raises:
        ConfigError: no experts were found, the model is sharded already, or PEFT's adapters cannot be shared out.
        RanksDisagree: the ranks' models or configs differ; the message says in what.
        MemfineError: DistributedDataParallel of this torch cannot ignore parameters.
    """
    if sharded_parameters(model):
        raise ConfigError("this model's experts are sharded already")
    if not IGNORED_BY_DDP.holds():
        raise MemfineError(
            "expert_parallel cannot tell DistributedDataParallel of this torch to leave the experts alone, "
            "and it would average different experts"
        )
    shards = [*_tables(model, ranks), *_lists(model, ranks)]
    shards += adapters_of(model, shards)
    config = config or Config()
    _check_same(_described(model, shards, config, ranks), ranks)
    if not shards:
        raise ConfigError(
            "no experts were found to shard: expected parameters [E,...] in a module, or a ModuleList of experts, "
            "whose class or path holds 'expert' or 'moe'"
        )
    if ranks.leaves_slots_open:
        ranks = ranks.with_slots(_agreed_slots(shards, ranks, config))
        shards = [dataclasses.replace(shard, ranks=ranks) for shard in shards]
    by_module: dict[nn.Module, list[ShardedParameter]] = {}
    for shard in shards:
        by_module.setdefault(shard.module, []).append(shard)
    done: set[int] = set()
    for module, owned in by_module.items():
        for shard in owned:
            if id(shard.parameter) not in done:
                done.add(id(shard.parameter))
                shard.parameter.grad = None
                shard.parameter.data = shard.own(shard.parameter.data).clone()
        _make_whole_when_read(module, owned)
        object.__setattr__(module, _ATTRIBUTE, tuple(owned))
        speak_dtensor(module, owned)
    add_by_slices(model)
    widen(Exchange(ranks.group, ranks.device), ranks.slots + max(shard.placement.num_experts for shard in shards))
    measure_bandwidth(ranks)
    names = [name for name, parameter in model.named_parameters() if id(parameter) in done]
    ignore_in_ddp(model, names)
    return shards


def _agreed_slots(found: Sequence[ShardedParameter], ranks: ExpertGroup, config: Config) -> int:
    """Return the number of slots S by the memory budget, the same on every rank; a collective call.

    Two slots a rank let plans come to 1.05 of the mean at up to 1,024 ranks (docs/expert_parallel.md). Clones may take
    a twentieth of the budget.
    """
    device = ranks.device
    device_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_bytes()
    budget = parse_budget(config.memory_budget, device_bytes)
    fits = [slots for slots in range(1, _MOST_SLOTS + 1) if _clones_bytes(found, slots) * _SLOTS_PART <= (budget or 0)]
    own = max(fits, default=0)
    slots_by_rank = gather_rows(Exchange(ranks.group, device), torch.tensor([own]), Place("the model", "sharding"))
    return int(slots_by_rank.min())


def _clones_bytes(found: Sequence[ShardedParameter], slots: int) -> int:
    """Return the bytes of clones in the layer with most of them, without those of adapters, which are small."""
    by_module: dict[nn.Module, int] = {}
    for shard in found:
        if shard.expert is None:
            parameter, placement = shard.parameter, shard.placement
            numbers = parameter.numel() // placement.num_experts
            num_bytes = bytes_of_clones(
                numbers, parameter.dtype, slots, placement.per_rank, with_gradients=parameter.requires_grad
            )
            by_module[shard.module] = by_module.get(shard.module, 0) + num_bytes
    return max(by_module.values(), default=0)


def sharded_parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """Return each sharded parameter by its name in the model."""
    return {
        f"{path}.{shard.name}" if path else shard.name: shard
        for path, module in model.named_modules()
        for shard in getattr(module, _ATTRIBUTE, ())
    }


def _tables(model: nn.Module, ranks: ExpertGroup) -> Iterator[ShardedParameter]:
    for path, module in model.named_modules():
        if not _names_experts(f"{path} {type(module).__name__}"):
            continue
        packed = packed_experts(module)
        if packed is not None:
            placement = Placement(packed, ranks.num_ranks)
            shape = tuple(module.original.shape)
            yield ShardedParameter(module, "original", path, shape, placement, None, ranks, "rows", shape[0] // packed)
            continue
        own = {name: parameter for name, parameter in own_parameters(module).items() if parameter is not None}
        sizes = {parameter.shape[0] for parameter in own.values() if parameter.ndim >= 3}
        if len(sizes) != 1 or isinstance(module, _CONVOLUTIONS):
            continue
        (num_experts,) = sizes
        for name, parameter in own.items():
            if parameter.shape[0] == num_experts and (parameter.ndim >= 3 or (parameter.ndim == 2 and "bias" in name)):
                placement = Placement(num_experts, ranks.num_ranks)
                yield ShardedParameter(module, name, path, tuple(parameter.shape), placement, None, ranks)


def _lists(model: nn.Module, ranks: ExpertGroup) -> Iterator[ShardedParameter]:
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or "expert" not in path.rpartition(".")[2].lower():
            continue
        named = module.items() if isinstance(module, nn.ModuleDict) else ((str(i), own) for i, own in enumerate(module))
        members = dict(named)
        layouts = {
            tuple((name, param.shape) for name, param in member.named_parameters()) for member in members.values()
        }
        if len(members) < 2 or len(layouts) != 1:
            continue
        placement = Placement(len(members), ranks.num_ranks)
        for expert, (key, member) in enumerate(members.items()):
            for child_path, child in member.named_modules(prefix=f"{path}.{key}"):
                for name, param in own_parameters(child).items():
                    if param is not None:
                        yield ShardedParameter(child, name, child_path, tuple(param.shape), placement, expert, ranks)


def _names_experts(text: str) -> bool:
    return "expert" in text.lower() or "moe" in text.lower()


def _make_whole_when_read(module: nn.Module, owned: Sequence[ShardedParameter]) -> None:
    cls = type(module)
    own: dict[str, Any] = {shard.name: property(_reader(shard)) for shard in owned}
    for shard in owned:
        if shard.layout != "table":
            own[EXPERTS_FIRST] = property(_reader_of_experts(shard))
    own |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__setattr__": _setter(cls, owned)}
    module.__class__ = type(cls.__name__, (cls,), own)


def _setter(cls: type[nn.Module], owned: Sequence[ShardedParameter]) -> Any:
    """Return a `__setattr__` that rejects parameters sharded by FSDP2, which sets them through an overridden one.

    FSDP2 would cut each rank's slice and join parts of different experts.
    """
    names = {shard.name: shard.full_name for shard in owned}

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if name in names and isinstance(value, DTensor):
            raise ConfigError(
                f"{names[name]} holds other experts on each rank and cannot be sharded over them once more: call "
                "fully_shard(..., ignored_params={one.parameter for one in sharded_parameters(model).values()}), with "
                "sharded_parameters of memfine_fx.expert_parallel.shard"
            )
        cls.__setattr__(self, name, value)

    return set_attribute


def _reader(one: ShardedParameter) -> Any:
    name, full_name, key = one.name, one.full_name, one.ranks.key
    if one.expert is None:
        layout, read_experts = one.layout, _reader_of_experts(one)

        def read_table(self: nn.Module) -> torch.Tensor:
            own = own_parameters(self)[name]
            if not isinstance(own, nn.Parameter):
                return own  # type: ignore[return-value]  # a whole table that `functional_call` put in its place
            return with_experts_back(read_experts(self), layout)

        return read_table
    owner, shape = one.placement.owner(one.expert), list(one.shape)

    def read_one(self: nn.Module) -> torch.Tensor:
        own = own_parameters(self)[name]
        whole: torch.Tensor = torch.ops.memfine.expert_of.default(own, shape, owner, key, full_name, OUTSIDE)
        return whole if torch.compiler.is_compiling() or own is None else readable(whole, own)

    return read_one


def _reader_of_experts(one: ShardedParameter) -> Any:
    """Return a getter of a whole expert weight, or of a whole adapter factor, as [E,...]."""
    name, full_name, key, layout, rank = one.name, one.full_name, one.ranks.key, one.layout, one.rank
    num_experts = one.placement.num_experts

    def read(self: nn.Module) -> torch.Tensor:
        own = own_parameters(self)[name]
        assert own is not None
        first = experts_first(own, layout, rank)
        whole: torch.Tensor = torch.ops.memfine.all_experts.default(first, num_experts, key, full_name, OUTSIDE)
        return whole

    return read


def _described(
    model: nn.Module, found: Sequence[ShardedParameter], config: Config, ranks: ExpertGroup
) -> dict[str, str]:
    """Return by name, in words, the parameters and options that must be the same on every rank of the group."""
    sharded = {id(shard.parameter) for shard in found}
    described = {
        f"parameter {name}": f"{list(parameter.shape)} {parameter.dtype}"
        f"{'' if parameter.requires_grad else ', frozen'}{', sharded' if id(parameter) in sharded else ''}"
        for name, parameter in model.named_parameters()
    }
    for field in dataclasses.fields(config):
        if field.name != "memory_budget":
            described[f"Config.{field.name}"] = repr(getattr(config, field.name))
    described["expert_group(overlaps=...)"] = repr(ranks.overlaps)
    described["expert_group(slots=...)"] = repr(None if ranks.leaves_slots_open else ranks.slots)
    return described


def _check_same(own: dict[str, str], ranks: ExpertGroup) -> None:
    everyone: list[Any] = [None] * ranks.num_ranks
    with failing_at(Place("the model", "sharding"), ranks.group):
        dist.all_gather_object(everyone, own, group=ranks.group)
    for rank, other in enumerate(everyone):
        for name in {**everyone[0], **other}:
            base, value = everyone[0].get(name, "absent"), other.get(name, "absent")
            if base != value:
                raise RanksDisagree(
                    f"ranks of the expert parallel group differ: {name} is {base} on rank 0 and {value} on rank {rank}"
                )
