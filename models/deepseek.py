"""DeepSeek-V3's MoE layer (DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437).

Sigmoid scores; a correction bias, which balances the load and carries no gradient, is added for the choice
only; the choice is limited to the best groups of experts, a group counting as the sum of its two best; the
chosen scores are normalised and scaled. A shared expert sees every token. How the correction bias is
updated between steps is the training loop's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import (
    GatedExperts,
    GatedMLP,
    Spelling,
    check_routing,
    check_spelling,
    init_scaled_normal,
    upcast,
)


@dataclass(frozen=True)
class DeepseekConfig:
    """Sizes of one layer; the experts of the `num_limited_groups` best of `num_groups` groups compete."""

    hidden: int = 64
    expert_width: int = 32
    num_experts: int = 16
    top_k: int = 4
    num_groups: int = 4
    num_limited_groups: int = 2
    num_shared_experts: int = 1
    routed_scale: float = 2.5
    spelling: Spelling = "grouped"

    def __post_init__(self) -> None:
        check_spelling(self.spelling)
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups must divide num_experts={self.num_experts}, got {self.num_groups}")
        if not 1 <= self.num_limited_groups <= self.num_groups:
            raise ValueError(
                f"num_limited_groups must be in 1..num_groups={self.num_groups}, got {self.num_limited_groups}"
            )
        check_routing(self.num_limited_groups * self.group_size, self.top_k)

    @property
    def group_size(self) -> int:
        """Experts in one group."""
        return self.num_experts // self.num_groups


class DeepseekRouter(nn.Module):
    """hidden [T, H] -> expert index [T, K] and routing weight [T, K]."""

    e_score_correction_bias: Tensor

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight again and clear the correction bias."""
        init_scaled_normal(self.weight, self.config.hidden)
        nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [T, H] -> expert index [T, K] and routing weight [T, K]."""
        scores = F.linear(upcast(tokens), upcast(self.weight)).sigmoid()
        expert_index = self._choose(scores.detach() + self.e_score_correction_bias)
        weight = scores.gather(1, expert_index)
        weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
        return expert_index, weight * self.config.routed_scale

    def _choose(self, scores: Tensor) -> Tensor:
        """scores [T, E] -> the K best experts of the best groups, [T, K]."""
        config = self.config
        grouped = scores.view(-1, config.num_groups, config.group_size)
        group_scores = grouped.topk(min(2, config.group_size), dim=-1).values.sum(dim=-1)
        best_groups = group_scores.topk(config.num_limited_groups, dim=-1).indices
        is_shut = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best_groups, False)
        limited = grouped.masked_fill(is_shut.unsqueeze(-1), float("-inf")).flatten(1)
        return limited.topk(config.top_k, dim=-1).indices


class DeepseekMoE(nn.Module):
    """Router, routed experts and shared expert; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = DeepseekRouter(config)
        self.experts = GatedExperts(config.num_experts, config.hidden, config.expert_width, config.spelling)
        self.shared_experts = GatedMLP(config.hidden, config.expert_width * config.num_shared_experts)

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        self.gate.reset_parameters()
        self.experts.reset_parameters()
        self.shared_experts.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        expert_index, routing_weight = self.gate(tokens)
        out: Tensor = self.experts(tokens, expert_index, routing_weight) + self.shared_experts(tokens)
        return out.view(hidden.shape)
