"""Hash layers (Roller et al., arXiv:2106.04426): a table of integers says which expert takes which vocabulary entry.

Nothing is learned about routing and no weight multiplies the experts: token ids are looked up in a fixed table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import check_routing, init_scaled_normal


@dataclass(frozen=True)
class HashedConfig:
    """Sizes of one model: an embedding, one layer of experts, and their sum."""

    vocabulary: int = 64
    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8

    def __post_init__(self) -> None:
        check_routing(self.num_experts, top_k=1)


class HashedMoE(nn.Module):
    """Embedding and ReLU experts wi [E, H, F], wo [E, F, H]; token ids [B, S] -> [B, S, H]."""

    table: Tensor

    def __init__(self, config: HashedConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.wi = nn.Parameter(torch.empty(config.num_experts, config.hidden, config.expert_width))
        self.wo = nn.Parameter(torch.empty(config.num_experts, config.expert_width, config.hidden))
        self.register_buffer("table", torch.randint(config.num_experts, (config.vocabulary,)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.wi, self.config.hidden)
        init_scaled_normal(self.wo, self.config.expert_width)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [B, S] -> [B, S, H]."""
        hidden = self.embedding(token_ids)
        index = self.table[token_ids]
        inner = F.relu(torch.einsum("bsh,bshf->bsf", hidden, self.wi[index]))
        out: Tensor = hidden + torch.einsum("bsf,bsfh->bsh", inner, self.wo[index])
        return out
