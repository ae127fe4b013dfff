"""GPT-OSS's MoE layer (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925).

Softmax over the K largest logits; weights stored as [E, in, out] with a bias on both projections; gate and
up features interleaved; both clamped before a swish with its own slope, and up shifted by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import (
    Spelling,
    check_routing,
    check_spelling,
    init_scaled_normal,
    route_rows,
    upcast,
)


@dataclass(frozen=True)
class GptOssConfig:
    """Sizes of one layer, and the constants of its activation."""

    hidden: int = 64
    expert_width: int = 64
    num_experts: int = 8
    top_k: int = 4
    limit: float = 7.0
    alpha: float = 1.702
    spelling: Spelling = "grouped"

    def __post_init__(self) -> None:
        check_routing(self.num_experts, self.top_k)
        check_spelling(self.spelling)


class GptOssExperts(nn.Module):
    """gate_up_proj [E, H, 2F] + bias [E, 2F], interleaved; down_proj [E, F, H] + bias [E, H]."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.config = config
        num_experts, hidden, width = config.num_experts, config.hidden, config.expert_width
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, hidden, 2 * width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate_up_proj, self.config.hidden)
        init_scaled_normal(self.gate_up_proj_bias, self.config.hidden)
        init_scaled_normal(self.down_proj, self.config.expert_width)
        init_scaled_normal(self.down_proj_bias, self.config.expert_width)

    def forward(self, hidden: Tensor, expert_index: Tensor, routing_weight: Tensor) -> Tensor:
        """hidden [T, H], expert_index [T, K], routing_weight [T, K] -> [T, H]."""
        routed = route_rows(self.config.spelling, expert_index, self.config.num_experts)
        gate_up = routed.linear(routed.take(hidden), self.gate_up_proj, is_transposed=True)
        activated = self._activate(gate_up + self.gate_up_proj_bias[routed.expert_ids])
        rows = routed.linear(activated, self.down_proj, is_transposed=True)
        return routed.combine(rows + self.down_proj_bias[routed.expert_ids], routing_weight)

    def _activate(self, gate_up: Tensor) -> Tensor:
        """gate_up [R, 2F], interleaved -> [R, F]."""
        limit = self.config.limit
        gate = gate_up[..., ::2].clamp(max=limit)
        up = gate_up[..., 1::2].clamp(min=-limit, max=limit)
        return (up + 1) * gate * torch.sigmoid(self.config.alpha * gate)


class GptOssMoE(nn.Module):
    """Router and experts; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.hidden, config.num_experts)
        self.experts = GptOssExperts(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.router.weight, self.config.hidden)
        init_scaled_normal(self.router.bias, self.config.hidden)
        self.experts.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        top_logits, expert_index = torch.topk(self.router(tokens), self.config.top_k, dim=-1)
        routing_weight = F.softmax(upcast(top_logits), dim=-1)
        out: Tensor = self.experts(tokens, expert_index, routing_weight)
        return out.view(hidden.shape)
