"""Dense mixtures that mask: every expert runs on every token, and [T, E] weights zero what was not chosen.

Hand-written layers spell the weights in several ways: a scatter of the top-k values into zeros, a one-hot of the
index summed over the choices, a mask on the softmax that is normalised again, or a softmax of masked logits. And the
experts either as einsums, [T, E, F], or as batched matmuls, [E, T, F].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import check_routing, init_scaled_normal

Weighting = Literal["scatter", "one_hot", "mask", "masked_softmax"]


@dataclass(frozen=True)
class DenseConfig:
    """Sizes of one layer, and how it is spelled."""

    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    top_k: int = 2
    weighting: Weighting = "scatter"
    uses_einsum: bool = True

    def __post_init__(self) -> None:
        check_routing(self.num_experts, self.top_k)


class DenseMoE(nn.Module):
    """Router and GELU experts wi [E, H, F], bi [E, F], wo [E, F, H], bo [E, H]; hidden keeps its shape."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.config = config
        num_experts, hidden, width = config.num_experts, config.hidden, config.expert_width
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.wi = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.bi = nn.Parameter(torch.empty(num_experts, width))
        self.wo = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.bo = nn.Parameter(torch.empty(num_experts, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.config.hidden)
        for weight in (self.wi, self.bi, self.wo, self.bo):
            init_scaled_normal(weight, weight.shape[-2])

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        weights = self._weights(self.gate(tokens))
        if self.config.uses_einsum:
            inner = F.gelu(torch.einsum("th,ehf->tef", tokens, self.wi) + self.bi)
            rows = torch.einsum("tef,efh->teh", inner, self.wo) + self.bo
            return torch.einsum("te,teh->th", weights, rows).view(hidden.shape)
        inner = F.gelu(torch.matmul(tokens.unsqueeze(0), self.wi) + self.bi[:, None])
        rows = torch.matmul(inner, self.wo) + self.bo[:, None]
        return (rows * weights.t().unsqueeze(-1)).sum(dim=0).view(hidden.shape)

    def _weights(self, logits: Tensor) -> Tensor:
        """logits [T, E] -> weights [T, E], zero where a token did not choose the expert."""
        spelling, top_k = self.config.weighting, self.config.top_k
        probability = F.softmax(logits, dim=-1)
        values, index = torch.topk(probability, top_k, dim=-1)
        if spelling == "scatter":
            return torch.zeros_like(probability).scatter(1, index, values)
        if spelling == "one_hot":
            return (F.one_hot(index, self.config.num_experts).to(values.dtype) * values.unsqueeze(-1)).sum(dim=1)
        if spelling == "mask":
            masked = probability * torch.zeros_like(probability).scatter_(1, index, 1.0)
            return masked / masked.sum(dim=-1, keepdim=True)
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, True)
        return F.softmax(logits.masked_fill(~is_chosen, float("-inf")), dim=-1)
