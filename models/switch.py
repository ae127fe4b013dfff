"""The Switch Transformer's layer (Fedus et al., arXiv:2101.03961): top-1 with capacity, one-hot einsums.

All tokens of a call form one group. Each expert takes its first C = ceil(capacity_factor * T / E) tokens;
later ones are dropped and come out as zero (the residual connection around the layer carries them). Tokens
therefore interact through the running count of each expert: the layer as a whole is not separable by
token, only the expert network on [E, C, H] is separable by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import check_routing, init_scaled_normal, upcast


@dataclass(frozen=True)
class SwitchConfig:
    """Sizes of one layer; a capacity_factor of num_experts or more drops nothing.

    With `has_biases` there are biases of slots bi [E, 1, F], bo [E, 1, H], and dropout of probability zero behind them.
    """

    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    capacity_factor: float = 1.25
    has_biases: bool = False

    def __post_init__(self) -> None:
        check_routing(self.num_experts, top_k=1)
        if not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor must be positive, got {self.capacity_factor}")

    def capacity(self, num_tokens: int) -> int:
        """C, the rows each expert takes of `num_tokens` tokens."""
        return math.ceil(self.capacity_factor * num_tokens / self.num_experts)


class SwitchMoE(nn.Module):
    """Router and ReLU experts wi [E, H, F], wo [E, F, H]; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: SwitchConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.wi = nn.Parameter(torch.empty(config.num_experts, config.hidden, config.expert_width))
        self.wo = nn.Parameter(torch.empty(config.num_experts, config.expert_width, config.hidden))
        if config.has_biases:
            self.bi = nn.Parameter(torch.empty(config.num_experts, 1, config.expert_width))
            self.bo = nn.Parameter(torch.empty(config.num_experts, 1, config.hidden))
            self.dropout = nn.Dropout(0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.router.weight, self.config.hidden)
        init_scaled_normal(self.wi, self.config.hidden)
        init_scaled_normal(self.wo, self.config.expert_width)
        if self.config.has_biases:
            init_scaled_normal(self.bi, self.config.hidden)
            init_scaled_normal(self.bo, self.config.expert_width)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        probability = F.softmax(upcast(self.router(tokens)), dim=-1)
        gate, expert_index = probability.max(dim=-1)
        dispatch = self._dispatch_mask(expert_index).to(tokens.dtype)
        combine = dispatch * gate.to(tokens.dtype)[:, None, None]

        rows = torch.einsum("tec,th->ech", dispatch, tokens)
        rows = torch.einsum("ech,ehf->ecf", rows, self.wi)
        rows = F.relu(rows + self.bi if self.config.has_biases else rows)
        rows = torch.einsum("ecf,efh->ech", rows, self.wo)
        rows = self.dropout(rows + self.bo) if self.config.has_biases else rows
        return torch.einsum("tec,ech->th", combine, rows).view(hidden.shape)

    def _dispatch_mask(self, expert_index: Tensor) -> Tensor:
        """expert_index [T] -> boolean [T, E, C], true where a token sits in a slot of an expert."""
        is_chosen = F.one_hot(expert_index, self.config.num_experts)
        # The slot of a token is -1 where it did not choose the expert, and C or more where it came too late.
        slot = torch.cumsum(is_chosen, dim=0) * is_chosen - 1
        slots = torch.arange(self.config.capacity(expert_index.shape[0]), device=slot.device)
        return slot.unsqueeze(-1) == slots
