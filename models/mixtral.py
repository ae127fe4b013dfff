"""Mixtral's MoE layer (Jiang et al., "Mixtral of Experts", arXiv:2401.04088) with stacked experts.

Softmax over all experts, the K largest renormalised to sum to one, SwiGLU experts. The spelling is the one
of current model libraries: sorted rows and grouped matmuls, or gathered weights and batched matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from memfine_fx.models._experts import (
    GatedExperts,
    Spelling,
    check_routing,
    check_spelling,
    init_scaled_normal,
    softmax_top_k,
)


@dataclass(frozen=True)
class MixtralConfig:
    """Sizes of one layer; "grouped" needs bfloat16 under compile and widths that are multiples of 8."""

    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    top_k: int = 2
    spelling: Spelling = "grouped"

    def __post_init__(self) -> None:
        check_routing(self.num_experts, self.top_k)
        check_spelling(self.spelling)


class MixtralMoE(nn.Module):
    """Router and experts; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = GatedExperts(config.num_experts, config.hidden, config.expert_width, config.spelling)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.config.hidden)
        self.experts.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        expert_index, routing_weight = softmax_top_k(self.gate(tokens), self.config.top_k)
        out: Tensor = self.experts(tokens, expert_index, routing_weight)
        return out.view(hidden.shape)
