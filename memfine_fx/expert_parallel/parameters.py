"""One parameter of which this rank holds a part, and what it is in a state dict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from memfine_fx.compat.nn import own_parameters
from memfine_fx.expert_parallel.groups import ExpertGroup
from memfine_fx.expert_parallel.placement import Placement

__all__ = ["ShardedParameter", "speak_dtensor"]


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter of which this rank holds a part.

    Args:
        module: that owns it.
        name: in the module.
        path: of the module in the model, for messages.
        shape: of the whole: [E,...] of a table, or one expert's own.
        placement: of the experts.
        expert: whose it is, for a parameter of one expert's module; None for a table.
        ranks: that share the experts.
    """

    module: nn.Module
    name: str
    path: str
    shape: tuple[int, ...]
    placement: Placement
    expert: int | None
    ranks: ExpertGroup

    @property
    def parameter(self) -> nn.Parameter:
        parameter = own_parameters(self.module)[self.name]
        assert parameter is not None
        return parameter

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def is_here(self) -> bool:
        """Whether this rank holds any of it."""
        owned = self.placement.owned(self.ranks.rank)
        return len(owned) > 0 if self.expert is None else self.expert in owned

    def as_dtensor(self, own: torch.Tensor) -> torch.Tensor:
        """This rank's part of a table [E,...], or of what belongs to it, as the part of a DTensor that it is."""
        if self.expert is not None or own.shape[1:] != self.shape[1:]:
            return own
        placements: list[Shard | Replicate] = [Replicate()] * self.ranks.mesh.ndim
        placements[self.ranks.expert_dim] = Shard(0)
        stride = torch.empty(self.shape, device="meta").stride()
        whole: torch.Tensor = DTensor.from_local(
            own, self.ranks.mesh, placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )
        return whole

    def from_state(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of what a state dict holds: a DTensor on any mesh, the whole, or the part itself."""
        if isinstance(value, DTensor):
            is_ours = value.device_mesh == self.ranks.mesh and value.placements[self.ranks.expert_dim] == Shard(0)
            if is_ours:
                return value.to_local()
            value = value.full_tensor()
        return self.own(value) if tuple(value.shape) == self.shape else value

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole."""
        owned = self.placement.owned(self.ranks.rank)
        if self.expert is None:
            return whole[owned.start : owned.stop]
        return whole if self.expert in owned else whole.new_empty(0)


def speak_dtensor(module: nn.Module, owned: Sequence[ShardedParameter]) -> None:
    """State dicts of a module hold its tables as DTensors, and of a list of experts only those that are here.

    Such state dicts save and load through torch.distributed.checkpoint, for another number of ranks too.
    `load_state_dict` takes them as well as whole tensors.
    """
    hooked: Any = module  # nn.Module does not annotate these methods
    hooked.register_state_dict_post_hook(partial(_say, tuple(owned)))
    hooked.register_load_state_dict_pre_hook(partial(_hear, tuple(owned)))


def _say(
    owned: Sequence[ShardedParameter], module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for one in owned:
        if one.expert is None:
            state_dict[prefix + one.name] = one.as_dtensor(state_dict[prefix + one.name])
        elif not one.is_here:
            del state_dict[prefix + one.name]


def _hear(
    owned: Sequence[ShardedParameter], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    for one in owned:
        key = prefix + one.name
        if key in state_dict:
            state_dict[key] = one.from_state(state_dict[key])
        elif not one.is_here:
            state_dict[key] = one.parameter.detach()
