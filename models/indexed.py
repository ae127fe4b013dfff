"""Weights taken by indexing, `W[index]`, and einsums over them; tokens keep their batch and sequence dimensions.

A short spelling found in teaching code and in models with few tokens: it copies N = T * K expert matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import check_routing, init_scaled_normal, softmax_top_k


@dataclass(frozen=True)
class IndexedConfig:
    """Sizes of one layer; `uses_matmul` writes broadcast matmuls in place of the einsums."""

    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    top_k: int = 2
    uses_matmul: bool = False

    def __post_init__(self) -> None:
        check_routing(self.num_experts, self.top_k)


class IndexedMoE(nn.Module):
    """Router and SwiGLU experts w1, w3 [E, H, F], w2 [E, F, H]; hidden [B, S, H] -> [B, S, H]."""

    def __init__(self, config: IndexedConfig) -> None:
        super().__init__()
        self.config = config
        num_experts, hidden, width = config.num_experts, config.hidden, config.expert_width
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.config.hidden)
        for weight in (self.w1, self.w2, self.w3):
            init_scaled_normal(weight, weight.shape[-2])

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] -> [B, S, H]."""
        index, weight = softmax_top_k(self.gate(hidden), self.config.top_k)
        if self.config.uses_matmul:
            rows = hidden[:, :, None, None, :]
            inner = F.silu(rows @ self.w1[index]) * (rows @ self.w3[index])
            return (weight.unsqueeze(-2) @ (inner @ self.w2[index]).squeeze(-2)).squeeze(-2)
        inner = F.silu(torch.einsum("bsh,bskhf->bskf", hidden, self.w1[index]))
        inner = inner * torch.einsum("bsh,bskhf->bskf", hidden, self.w3[index])
        rows = torch.einsum("bskf,bskfh->bskh", inner, self.w2[index])
        return (rows * weight.unsqueeze(-1)).sum(dim=-2)
