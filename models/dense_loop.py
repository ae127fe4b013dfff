"""The dense loop over a list of experts: every expert runs on every token, and zeros mask what was not chosen.

Usual in teaching code and small models, because it needs no indexing. The weights' columns are spelled in three ways,
and the results are added one by one or stacked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from memfine_fx.models._experts import LayerConfig, ListedExperts, softmax_top_k

LoopSpelling = Literal["columns", "masks", "slices", "stack"]


@dataclass(frozen=True)
class DenseLoopConfig(LayerConfig):
    """Sizes of one layer, and how it is spelled."""

    spelling: LoopSpelling = "columns"


class DenseLoopMoE(ListedExperts):
    """Router and a list of SwiGLU experts; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: DenseLoopConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        index, values = softmax_top_k(self.gate(tokens), self.config.top_k)
        if self.config.spelling == "masks":
            return self._with_masks(tokens, index, values).view(hidden.shape)
        weights = torch.zeros(tokens.shape[0], self.config.num_experts, dtype=values.dtype, device=values.device)
        weights = weights.scatter(1, index, values)
        if self.config.spelling == "stack":
            rows = torch.stack([expert(tokens) for expert in self.experts], dim=1)
            return (rows * weights.unsqueeze(-1)).sum(dim=1).view(hidden.shape)
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            if self.config.spelling == "slices":
                out += weights[:, expert_id : expert_id + 1] * expert(tokens)
            else:
                out = out + expert(tokens) * weights[:, expert_id].unsqueeze(-1)
        return out.view(hidden.shape)

    def _with_masks(self, tokens: Tensor, index: Tensor, values: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            weight = (values * (index == expert_id)).sum(dim=-1, keepdim=True)
            out = out + weight * expert(tokens)
        return out
