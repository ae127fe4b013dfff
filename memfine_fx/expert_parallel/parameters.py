"""Represent a parameter of which this rank holds a part, also in state dicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from memfine_fx.compat.nn import own_parameters
from memfine_fx.expert_parallel.exchange import as_bytes
from memfine_fx.expert_parallel.groups import ExpertGroup
from memfine_fx.expert_parallel.placement import Placement

__all__ = ["Layout", "ShardedParameter", "experts_first", "speak_dtensor", "with_experts_back"]

Layout = Literal["table", "rows", "columns"]
"""Position of experts in a shape: [E,...]; [E*r,in], an expert's rows consecutive; [out,r*E], experts interleaved."""


def experts_first(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Return a parameter, or some experts' part of it, as [E,...]: [E,r,in] of rows, [E,out,r] of columns."""
    if layout == "table":
        return tensor
    # A quotient, for a rank that owns no expert: of no entries -1 could be any number.
    num_experts = tensor.shape[0 if layout == "rows" else 1] // rank
    if layout == "rows":
        return tensor.view(num_experts, rank, tensor.shape[1])
    return tensor.view(tensor.shape[0], rank, num_experts).permute(2, 0, 1)


def with_experts_back(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tensor [E,...] in the layout of its parameter: the inverse of `experts_first`."""
    if layout == "rows":
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1, 2) if layout == "columns" else tensor


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter of which this rank holds a part.

    Args:
        module: that owns it.
        name: in the module.
        path: of the module in the model, for messages.
        shape: of the whole parameter: an expert weight, see `Layout`, or one expert's own.
        placement: of the experts.
        expert: whose it is, for a parameter of one expert's module; None for a table.
        ranks: that share the experts.
        layout: of an expert weight.
        rank: r of adapters' factors; of numbers in 4 bits, which are rows [E*r,1], the words of one expert.
    """

    module: nn.Module
    name: str
    path: str
    shape: tuple[int, ...]
    placement: Placement
    expert: int | None
    ranks: ExpertGroup
    layout: Layout = "table"
    rank: int = 0

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
        """Return whether this rank holds any part of the parameter."""
        owned = self.placement.owned(self.ranks.rank)
        return len(owned) > 0 if self.expert is None else self.expert in owned

    def is_like_parameter(self, value: torch.Tensor) -> bool:
        """Return whether an optimizer's state has as many dimensions as the parameter, in a state dict too."""
        return value.ndim in (len(self.shape), len(self._first_shape))

    def as_dtensor(self, own: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the parameter or of its optimizer state as a DTensor [E,...]; others unchanged."""
        if self.expert is not None:
            return own
        first = experts_first(own, self.layout, self.rank)
        whole_shape = self._first_shape
        if first.shape[1:] != whole_shape[1:]:
            return own
        placements: list[Shard | Replicate] = [Replicate()] * self.ranks.mesh.ndim
        placements[self.ranks.expert_dim] = Shard(0)
        stride = torch.empty(whole_shape, device="meta").stride()
        whole: torch.Tensor = DTensor.from_local(
            first.contiguous(), self.ranks.mesh, placements, run_check=False, shape=whole_shape, stride=stride
        )
        return whole

    def from_state(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a state dict's value: a DTensor on any mesh, the whole, or the part itself."""
        if isinstance(value, DTensor):
            is_ours = value.device_mesh == self.ranks.mesh and value.placements[self.ranks.expert_dim] == Shard(0)
            if is_ours:
                return with_experts_back(value.to_local(), self.layout)
            value = self.whole_of(value)
        return self.own(value) if tuple(value.shape) == self.shape else value

    def whole_of(self, value: DTensor) -> torch.Tensor:
        """Return the whole of a DTensor in the parameter's own layout; a collective call."""
        own, placements = as_bytes(value.to_local()), value.placements
        as_sent: DTensor = DTensor.from_local(
            own, value.device_mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
        )
        return with_experts_back(as_sent.full_tensor().view(value.dtype), self.layout)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the whole parameter."""
        owned = self.placement.owned(self.ranks.rank)
        if self.expert is None:
            return with_experts_back(
                experts_first(whole, self.layout, self.rank)[owned.start : owned.stop], self.layout
            )
        return whole if self.expert in owned else whole.new_empty(0)

    @property
    def _first_shape(self) -> torch.Size:
        return experts_first(torch.empty(self.shape, device="meta"), self.layout, self.rank).shape


def speak_dtensor(module: nn.Module, owned: Sequence[ShardedParameter]) -> None:
    """Make state dicts of a module hold its expert weights as DTensors, and of a list only this rank's experts.

    Such state dicts save and load through torch.distributed.checkpoint, for another number of ranks too.
    `load_state_dict` takes them as well as whole tensors.
    """
    hooked: Any = module  # nn.Module does not annotate these methods
    hooked.register_state_dict_post_hook(partial(_say, tuple(owned)))
    hooked.register_load_state_dict_pre_hook(partial(_hear, tuple(owned)))


def _say(
    owned: Sequence[ShardedParameter], module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for sharded in owned:
        if sharded.expert is None:
            state_dict[prefix + sharded.name] = sharded.as_dtensor(state_dict[prefix + sharded.name])
        elif not sharded.is_here:
            del state_dict[prefix + sharded.name]


def _hear(
    owned: Sequence[ShardedParameter], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    for sharded in owned:
        key = prefix + sharded.name
        if key in state_dict:
            state_dict[key] = sharded.from_state(state_dict[key])
        elif not sharded.is_here:
            state_dict[key] = sharded.parameter.detach()
