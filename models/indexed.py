"""Weights taken by indexing, `W[index]`, and einsums over them; tokens keep their batch and sequence dimensions.

A short spelling found in teaching code and in models with few tokens: it copies N = T * K expert matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.models._experts import LayerConfig, StackedExperts, softmax_top_k


@dataclass(frozen=True)
class IndexedConfig(LayerConfig):
    """Sizes of one layer; `uses_matmul` writes broadcast matmuls in place of the einsums."""

    uses_matmul: bool = False


class IndexedMoE(StackedExperts):
    """Router and SwiGLU experts w1, w3 [E, H, F], w2 [E, F, H]; hidden [B, S, H] -> [B, S, H]."""

    def __init__(self, config: IndexedConfig) -> None:
        super().__init__(config)
        self.config = config

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
