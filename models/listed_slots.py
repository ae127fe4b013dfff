"""Slots of a capacity buffer, [E, C, H], and a list of experts: one expert a slice, results put together again.

- "chunk"   slices [1, C, H] by `chunk`, results by `cat`: GShard's layer (arXiv:2006.16668) in training libraries.
- "unbind"  slices [C, H] by iteration, results by `stack`.

Dispatch and combine are einsums with a mask [T, E, C]; what exceeds C is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.models._experts import ListedExperts, check_spelling_among, softmax_top_k
from memfine_fx.models.capacity import CapacityConfig

ListedSlotsSpelling = Literal["chunk", "unbind"]


@dataclass(frozen=True)
class ListedSlotsConfig(CapacityConfig):
    """Sizes of one layer, and its spelling."""

    spelling: ListedSlotsSpelling = "chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_spelling_among(self.spelling, get_args(ListedSlotsSpelling))


class ListedSlotsMoE(ListedExperts):
    """Router and a list of SwiGLU experts; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: ListedSlotsConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        config = self.config
        tokens = hidden.reshape(-1, config.hidden)
        index, weight = softmax_top_k(self.gate(tokens), config.top_k)
        capacity = config.capacity(tokens.shape[0])
        chosen = F.one_hot(index, config.num_experts)
        place = (chosen.flatten(0, 1).cumsum(dim=0).view_as(chosen) - 1) * chosen
        within_capacity = chosen * (place < capacity)
        slot = F.one_hot(place.sum(dim=-1).clamp(max=capacity - 1), capacity).to(weight.dtype)
        combine = torch.einsum("tk,tke,tkc->tec", weight, within_capacity.to(weight.dtype), slot)
        rows = torch.einsum("tec,th->ech", combine.bool().to(tokens.dtype), tokens)
        return torch.einsum("tec,ech->th", combine.to(tokens.dtype), self._run(rows)).view(hidden.shape)

    def _run(self, rows: Tensor) -> Tensor:
        """Slots [E, C, H] -> [E, C, H]."""
        if self.config.spelling == "unbind":
            return torch.stack([expert(own) for expert, own in zip(self.experts, rows, strict=True)])
        parts = rows.chunk(self.num_experts, dim=0)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], dim=0)
