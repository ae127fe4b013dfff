"""The plain per-expert loop, as most hand-written MoE layers and the first Mixtral port spell it.

A ModuleList of SwiGLU experts; for each, `torch.where` finds its tokens, and `index_add_` returns the
weighted rows. Routing is Mixtral's (arXiv:2401.04088).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memfine_fx.models._experts import GatedMLP, check_routing, init_scaled_normal, softmax_top_k


@dataclass(frozen=True)
class NaiveConfig:
    """Sizes of one layer."""

    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    top_k: int = 2

    def __post_init__(self) -> None:
        check_routing(self.num_experts, self.top_k)


class NaiveMoE(nn.Module):
    """Router and a list of experts; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: NaiveConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(config.hidden, config.expert_width) for _ in range(config.num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.config.hidden)
        for expert in self.experts:
            assert isinstance(expert, GatedMLP)
            expert.reset_parameters()

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
