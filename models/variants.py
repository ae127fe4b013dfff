"""Expert functions other than SwiGLU, in one layer: what published and hand-written experts do to their rows.

one_linear      a single matrix                       relu_squared   Primer's activation (arXiv:2109.08668), no gate
biased          biases on both projections            geglu, reglu   GELU and ReLU gates (arXiv:2002.05202)
normed          RMSNorm with a weight per expert, then LayerNorm with a shared one, after the experts
interleaved     gate and up in alternating columns, clamped, GPT-OSS's activation
upcast          activation in float32 whatever the dtype
glu             torch's own `glu`, a sigmoid gate     softplus_mix   a gate by softplus, a softmax inside a row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import Spelling, check_routing, init_scaled_normal, route_rows, softmax_top_k

Variant = Literal[
    "one_linear", "relu_squared", "biased", "geglu", "reglu", "normed", "interleaved", "upcast", "glu", "softplus_mix"
]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class VariantConfig:
    """Sizes of one layer and the function of its experts."""

    variant: Variant
    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    top_k: int = 2
    spelling: Spelling = "gathered"

    def __post_init__(self) -> None:
        check_routing(self.num_experts, self.top_k)
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")


class VariantExperts(nn.Module):
    """Experts alone: (hidden [T, H], expert index [T, K], routing weight [T, K]) -> [T, H]."""

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        self.config = config
        num_experts, hidden, width = config.num_experts, config.hidden, config.expert_width
        self.up = nn.Parameter(torch.empty(num_experts, hidden, 2 * width))
        self.down = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.up_bias = nn.Parameter(torch.empty(num_experts, 2 * width))
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden))
        self.scale = nn.Parameter(torch.ones(num_experts, hidden))
        self.norm = nn.LayerNorm(hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        for weight in (self.up, self.down, self.up_bias, self.down_bias):
            init_scaled_normal(weight, weight.shape[-2])

    def forward(self, hidden: Tensor, expert_index: Tensor, routing_weight: Tensor) -> Tensor:
        """hidden [T, H], expert_index [T, K], routing_weight [T, K] -> [T, H]."""
        routed = route_rows(self.config.spelling, expert_index, self.config.num_experts)
        rows = routed.linear(routed.take(hidden), self.up, is_transposed=True)
        if self.config.variant == "one_linear":
            return routed.combine(rows[..., : hidden.shape[-1]], routing_weight)
        if self.config.variant == "biased":
            rows = rows + self.up_bias[routed.expert_ids]
        rows = routed.linear(self._activate(rows), self.down, is_transposed=True)
        if self.config.variant == "biased":
            rows = rows + self.down_bias[routed.expert_ids]
        if self.config.variant == "normed":
            rows = F.rms_norm(rows, rows.shape[-1:]) * self.scale[routed.expert_ids]
            rows = self.norm(rows)
        return routed.combine(rows, routing_weight)

    def _activate(self, rows: Tensor) -> Tensor:
        """[N, 2F] -> [N, F]."""
        variant, width = self.config.variant, self.config.expert_width
        if variant == "interleaved":
            gate, up = rows[..., ::2].clamp(max=7.0), rows[..., 1::2].clamp(min=-7.0, max=7.0)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)
        if variant == "glu":
            return F.glu(rows, dim=-1)
        gate, up = rows[..., :width], rows[..., width:]
        if variant == "relu_squared":
            return F.relu(gate).square()
        if variant == "upcast":
            upcast: Tensor = (F.silu(gate.float()) * up.float()).to(rows.dtype)
            return upcast
        if variant == "softplus_mix":
            return F.softplus(gate) * torch.softmax(up, dim=-1)
        activated: Tensor = F.gelu(gate) if variant == "geglu" else F.relu(gate) if variant == "reglu" else F.silu(gate)
        return activated * up


class VariantMoE(nn.Module):
    """Router and `VariantExperts`; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: VariantConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = VariantExperts(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.config.hidden)
        self.experts.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        index, weight = softmax_top_k(self.gate(tokens), self.config.top_k)
        out: Tensor = self.experts(tokens, index, weight)
        return out.view(hidden.shape)
