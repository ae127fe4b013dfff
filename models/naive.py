"""The plain per-expert loop, as most hand-written MoE layers and the first Mixtral port spell it.

A ModuleList of SwiGLU experts; for each, `torch.where` finds its tokens, and `index_add_` returns the
weighted rows. Routing is Mixtral's (arXiv:2401.04088).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memfine_fx.models._experts import LayerConfig, ListedExperts, softmax_top_k


@dataclass(frozen=True)
class NaiveConfig(LayerConfig):
    """Sizes of one layer."""


class NaiveMoE(ListedExperts):
    """Router and a list of experts; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: NaiveConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        expert_index, routing_weight = softmax_top_k(self.gate(tokens), self.config.top_k)
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            token, slot = torch.where(expert_index == expert_id)
            rows = expert(tokens[token]) * routing_weight[token, slot].unsqueeze(-1)
            out.index_add_(0, token, rows.to(out.dtype))
        return out.view(hidden.shape)
