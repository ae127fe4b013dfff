"""Experts that compute nothing (MoE++, arXiv:2410.07348; LongCat): some classes of the router are the identity.

The router chooses among E + Z classes. A choice below E is a SwiGLU expert; a choice of the other Z adds the token
itself, times its weight; the assignment still has a place among the rows, with an expert of its own choosing and a
weight of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memfine_fx.models._experts import GatedExperts, check_routing, init_scaled_normal, softmax_top_k


@dataclass(frozen=True)
class ZeroExpertsConfig:
    """Sizes of one layer; `num_zero_experts` is Z."""

    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    num_zero_experts: int = 2
    top_k: int = 2

    def __post_init__(self) -> None:
        check_routing(self.num_experts + self.num_zero_experts, self.top_k)


class ZeroExpertsMoE(nn.Module):
    """Router over E + Z classes and E experts; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: ZeroExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.num_experts + config.num_zero_experts, bias=False)
        self.experts = GatedExperts(config.num_experts, config.hidden, config.expert_width, "gathered")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.config.hidden)
        self.experts.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        index, weight = softmax_top_k(self.gate(tokens), self.config.top_k)
        is_zero = index >= self.config.num_experts
        identity = torch.where(is_zero, weight, 0.0).sum(dim=-1, keepdim=True)
        routed = self.experts(tokens, torch.where(is_zero, 0, index), weight.masked_fill(is_zero, 0.0))
        result: Tensor = (routed + tokens * identity).view(hidden.shape)
        return result
