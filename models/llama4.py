"""Llama 4's MoE layer: scores of all experts, zero but for the chosen; every expert runs on every token.

The top-k logits are scattered into a [T, E] of minus infinity, and a sigmoid makes them weights of the experts'
*inputs*: an expert that a token did not choose gets a row of zeros, and SwiGLU without biases makes zeros of it.
A shared expert's output takes the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import GatedMLP, check_routing, init_scaled_normal, upcast


@dataclass(frozen=True)
class Llama4Config:
    """Sizes of one layer; Llama 4 itself has top_k 1."""

    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    top_k: int = 1

    def __post_init__(self) -> None:
        check_routing(self.num_experts, self.top_k)


class Llama4MoE(nn.Module):
    """Router, experts gate_up_proj [E, H, 2F] and down_proj [E, F, H], shared expert; hidden keeps its shape."""

    def __init__(self, config: Llama4Config) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden, 2 * config.expert_width))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.expert_width, config.hidden))
        self.shared_expert = GatedMLP(config.hidden, config.expert_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.config.hidden)
        init_scaled_normal(self.gate_up_proj, self.config.hidden)
        init_scaled_normal(self.down_proj, self.config.expert_width)
        self.shared_expert.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        config = self.config
        tokens = hidden.reshape(-1, config.hidden)
        scores = self._scores(tokens)
        rows = tokens.repeat(config.num_experts, 1) * scores.transpose(0, 1).reshape(-1, 1)
        rows = rows.view(config.num_experts, -1, config.hidden)
        gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, dim=-1)
        rows = torch.bmm(up * F.silu(gate), self.down_proj).view(-1, config.hidden)
        out: Tensor = self.shared_expert(tokens)
        out.add_(rows.reshape(config.num_experts, -1, config.hidden).sum(dim=0))
        return out.view(hidden.shape)

    def _scores(self, tokens: Tensor) -> Tensor:
        """tokens [T, H] -> [T, E], zero where a token did not choose the expert."""
        logits = self.gate(tokens)
        best, index = torch.topk(logits, self.config.top_k, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, index, best)
        return torch.sigmoid(upcast(scores)).to(tokens.dtype)
