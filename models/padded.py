"""Rows in padded buffers, [E, C, H], with nothing dropped, and experts that choose their tokens.

- "padded"  each routed row is put in the next free slot of its expert; C = T * K, so that all fit.
- "choice"  each expert takes the C = T * K / E tokens that suit it best (Zhou et al., arXiv:2202.09368).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.models._experts import LayerConfig, StackedExperts, check_spelling_among, softmax_top_k

PaddedSpelling = Literal["padded", "choice"]


@dataclass(frozen=True)
class PaddedConfig(LayerConfig):
    """Sizes of one layer, and its spelling."""

    spelling: PaddedSpelling = "padded"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_spelling_among(self.spelling, get_args(PaddedSpelling))


class PaddedMoE(StackedExperts):
    """Router and SwiGLU experts w1, w3 [E, H, F], w2 [E, F, H]; hidden [B, S, H] or [T, H] keeps its shape."""

    def __init__(self, config: PaddedConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        run = self._padded if self.config.spelling == "padded" else self._choice
        return run(tokens).view(hidden.shape)

    def _padded(self, tokens: Tensor) -> Tensor:
        """tokens [T, H] -> [T, H]."""
        top_k, num_experts = self.config.top_k, self.config.num_experts
        index, weight = softmax_top_k(self.gate(tokens), top_k)
        order = index.flatten().argsort(stable=True)
        expert = index.flatten()[order]
        counts = F.one_hot(expert, num_experts).sum(dim=0)
        slot = torch.arange(expert.shape[0], device=expert.device) - (counts.cumsum(0) - counts)[expert]
        buffer = tokens.new_zeros(num_experts, expert.shape[0], tokens.shape[-1])
        buffer[expert, slot] = tokens[order // top_k]
        rows = self._experts(buffer)[expert, slot] * weight.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // top_k, rows)

    def _choice(self, tokens: Tensor) -> Tensor:
        """tokens [T, H] -> [T, H]."""
        probability = F.softmax(self.gate(tokens), dim=-1)
        capacity = max(1, tokens.shape[0] * self.config.top_k // self.config.num_experts)
        gate, token = probability.t().topk(min(capacity, tokens.shape[0]), dim=-1)
        rows = self._experts(tokens[token]) * gate.unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, token.reshape(-1), rows.reshape(-1, tokens.shape[-1]))

    def _experts(self, rows: Tensor) -> Tensor:
        """Slots [E, C, H] -> [E, C, H]."""
        return torch.bmm(F.silu(torch.bmm(rows, self.w1)) * torch.bmm(rows, self.w3), self.w2)
