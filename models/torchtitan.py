"""torchtitan's MoE layer: rows sorted by a stable argsort, three separate grouped matmuls, scatter-add combine.

The experts' weights are cast to the compute dtype where they are used; the routing weight multiplies the experts'
inputs or their outputs; the routed rows are added onto what a shared expert made of the same tokens; a buffer counts
each expert's load for a bias update outside the layer (auxiliary-loss-free balancing, arXiv:2408.15664).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import GatedMLP, check_routing, init_scaled_normal

GroupedMatmul = Callable[..., Tensor]


@dataclass(frozen=True)
class TorchtitanConfig:
    """Sizes of one layer and where its routing weight goes.

    `compute_dtype` is what rows and weights are cast to for the matmuls (None: no cast); `grouped_mm` is called as
    (rows [N,in], weight [E,in,out], offs=[E] int32).
    """

    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    top_k: int = 2
    scores_before_experts: bool = True
    has_shared_expert: bool = True
    compute_dtype: torch.dtype | None = torch.bfloat16
    grouped_mm: GroupedMatmul = F.grouped_mm

    def __post_init__(self) -> None:
        check_routing(self.num_experts, self.top_k)


class TorchtitanMoE(nn.Module):
    """Sigmoid router with a selection bias, experts w1, w3 [E,F,H] and w2 [E,H,F]; hidden keeps its shape."""

    expert_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(self, config: TorchtitanConfig) -> None:
        super().__init__()
        self.config = config
        num_experts, hidden, width = config.num_experts, config.hidden, config.expert_width
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.w3 = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.shared_expert = GatedMLP(hidden, width) if config.has_shared_expert else None
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.config.hidden)
        for weight in (self.w1, self.w2, self.w3):
            init_scaled_normal(weight, weight.shape[-1])

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        config = self.config
        tokens = hidden.reshape(-1, config.hidden)
        index, weight = self._route(tokens)
        counts = torch.histc(index.reshape(-1).float(), bins=config.num_experts, min=0, max=config.num_experts)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(index.reshape(-1), stable=True)
        column = weight.reshape(-1)[order].reshape(-1, 1)
        places = (order // config.top_k).reshape(-1, 1).expand(-1, config.hidden)
        rows = torch.gather(tokens, dim=0, index=places)
        if config.scores_before_experts:
            rows = (rows.to(torch.float32) * column).to(tokens.dtype)
        rows = self._experts(rows, counts)
        if not config.scores_before_experts:
            rows = (rows.to(torch.float32) * column).to(tokens.dtype)
        out = torch.zeros_like(tokens) if self.shared_expert is None else self.shared_expert(tokens)
        return out.scatter_add(dim=0, index=places, src=rows).reshape(hidden.shape)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [T, H] -> expert index and weights that sum to one, [T, K]."""
        scores = torch.sigmoid(self.gate(tokens).to(torch.float32))
        index = torch.topk(scores + self.expert_bias, self.config.top_k, dim=-1, sorted=False).indices
        weight = scores.gather(dim=-1, index=index)
        return index, weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [N, H] sorted by expert, counts [E] -> [N, H]."""
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        dtype = self.config.compute_dtype or rows.dtype
        w1, w2, w3 = (weight.to(dtype).transpose(-2, -1) for weight in (self.w1, self.w2, self.w3))
        inputs, grouped_mm = rows.to(dtype), self.config.grouped_mm
        inner = F.silu(grouped_mm(inputs, w1, offs=offsets)) * grouped_mm(inputs, w3, offs=offsets)
        return grouped_mm(inner, w2, offs=offsets).type_as(rows)
