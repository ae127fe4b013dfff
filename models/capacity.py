"""Top-k with capacity: rows are copied into their experts' buffers, [E, C, H]; what does not fit is dropped.

GShard's layer (Lepikhin et al., arXiv:2006.16668) as it is written without einsums: an assignment's slot is its
place in the running count of its expert, one spare row takes everything that is dropped, and the experts are two
batched matmuls. Tokens interact through the count; only the buffer's way through the experts is separable by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.models._experts import LayerConfig, StackedExperts, softmax_top_k


@dataclass(frozen=True)
class CapacityConfig(LayerConfig):
    """Sizes of one layer; each expert takes C = ceil(capacity_factor * T * K / E) rows."""

    capacity_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor must be positive, got {self.capacity_factor}")

    def capacity(self, num_tokens: int) -> int:
        """C, the rows each expert takes of `num_tokens` tokens."""
        return math.ceil(self.capacity_factor * num_tokens * self.top_k / self.num_experts)


class CapacityMoE(StackedExperts):
    """Router and SwiGLU experts w1, w3 [E, H, F], w2 [E, F, H]; hidden [B, S, H] or [T, H] keeps its shape."""

    def __init__(self, config: CapacityConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        config = self.config
        tokens = hidden.reshape(-1, config.hidden)
        index, weight = softmax_top_k(self.gate(tokens), config.top_k)
        capacity = config.capacity(tokens.shape[0])
        slot, is_kept = self._slots(index.reshape(-1), capacity)
        num_slots = config.num_experts * capacity
        buffer = tokens.new_zeros(num_slots + 1, config.hidden)
        buffer = buffer.index_copy(0, slot, tokens.repeat_interleave(config.top_k, dim=0))
        rows = buffer[:-1].view(config.num_experts, capacity, config.hidden)
        rows = torch.bmm(F.silu(torch.bmm(rows, self.w1)) * torch.bmm(rows, self.w3), self.w2)
        rows = torch.cat([rows.reshape(num_slots, config.hidden), tokens.new_zeros(1, config.hidden)])
        weighted = rows[slot] * (weight.reshape(-1) * is_kept).to(rows.dtype).unsqueeze(-1)
        return weighted.view(-1, config.top_k, config.hidden).sum(dim=1).view(hidden.shape)

    def _slots(self, expert_ids: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """expert_ids [N] -> slots [N] in [0, E * C], the last for what is dropped, and whether it is kept."""
        is_chosen = F.one_hot(expert_ids, self.config.num_experts)
        place = ((torch.cumsum(is_chosen, dim=0) - 1) * is_chosen).sum(dim=-1)
        is_kept = place < capacity
        spare = torch.full_like(expert_ids, self.config.num_experts * capacity)
        return torch.where(is_kept, expert_ids * capacity + place, spare), is_kept
