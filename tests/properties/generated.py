"""Generated MoE layers: every choice that people make when they write one, drawn independently.

Legend: T tokens, H hidden, E experts, K top-k, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "GeneratedMoE", "Recipe", "routing_of"]

Routing = Literal["random", "one expert", "first experts", "ties"]
HIDDEN, WIDTH = 8, 16

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu_squared": lambda x: F.relu(x) ** 2,
    "clamped": lambda x: x.clamp(-1.0, 1.5) * torch.sigmoid(1.7 * x),
    "wide": lambda x: F.silu(x.float()).to(x.dtype),
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Recipe:
    """One way of writing a layer.

    Args:
        product: how rows meet their expert's weights: "bmm" (row on the left), "bmm_column" (row on the right),
            "einsum" (keeping [T,K]), "einsum_tokens" (the same, of [T,H] by [T,K,...]), "grouped" (rows
            sorted by expert; bf16).
        weight_layout: "in_out" [E,in,out] or "out_in" [E,out,in].
        gate: "none", "halves" (gate and up in one projection), "interleaved" or "separate".
        weighs: where the routing weight goes: on the "output", the "inner" activations, the "input", or nowhere.
        combine: "sum" of a token's K rows, "index_add", or "einsum" with the weight (only with weighs "output").
        has_bias: per-expert biases on both projections.
        norm: "none", or "rms" after the experts, on each row.
        dtype: of weights and tokens.
    """

    product: str
    weight_layout: str
    gate: str
    activation: str
    weighs: str
    combine: str
    has_bias: bool
    norm: str
    dtype: torch.dtype
    num_experts: int
    top_k: int


class GeneratedMoE(nn.Module):
    """(hidden [T,H], index [T,K], weight [T,K]) -> [T,H]: the experts alone, so that routing is an input."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        inner = WIDTH if recipe.gate in ("none", "separate") else 2 * WIDTH
        self.up = self._stack(HIDDEN, inner)
        self.gate = self._stack(HIDDEN, inner) if recipe.gate == "separate" else None
        self.down = self._stack(WIDTH, HIDDEN)
        self.up_bias = self._bias(inner) if recipe.has_bias else None
        self.down_bias = self._bias(HIDDEN) if recipe.has_bias else None
        self.scale = nn.Parameter(torch.rand(HIDDEN, dtype=recipe.dtype) + 0.5) if recipe.norm == "rms" else None

    def _stack(self, width_in: int, width_out: int) -> nn.Parameter:
        shape = (width_in, width_out) if self.recipe.weight_layout == "in_out" else (width_out, width_in)
        return nn.Parameter(torch.randn(self.recipe.num_experts, *shape, dtype=self.recipe.dtype) / width_in**0.5)

    def _bias(self, width: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(self.recipe.num_experts, width, dtype=self.recipe.dtype) / 2)

    def forward(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        assert index.shape[1] == self.recipe.top_k  # K is a number, as behind a router, not a symbol
        if self.recipe.product == "grouped":
            return self._sorted(hidden, index, weight)
        if self.recipe.product.startswith("einsum"):
            return self._kept(hidden, index, weight)
        rows = hidden.repeat_interleave(self.recipe.top_k, dim=0)
        ids, scale = index.reshape(-1), weight.reshape(-1, 1)
        tokens = torch.arange(rows.shape[0], device=rows.device) // self.recipe.top_k
        project = lambda x, table, bias: self._gathered(x, table, bias, ids)  # noqa: E731  # two local spellings
        return self._combined(hidden, self._expert(rows, scale, project, ids), scale, tokens)

    def _sorted(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        ids, order = index.reshape(-1).sort(stable=True)
        tokens = order // self.recipe.top_k
        counts = torch.histc(ids.float(), bins=self.recipe.num_experts, min=0, max=self.recipe.num_experts - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        scale = weight.reshape(-1)[order].unsqueeze(-1)

        def project(rows: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
            matrix = table if self.recipe.weight_layout == "in_out" else table.transpose(-2, -1)
            out = F.grouped_mm(rows, matrix, offs=offsets)
            return out if bias is None else out + bias[ids]

        return self._combined(hidden, self._expert(hidden[tokens], scale, project, ids), scale, tokens, order)

    def _kept(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        letters = "tkio" if self.recipe.weight_layout == "in_out" else "tkoi"

        def project(rows: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
            lead = "ti" if rows.ndim == 2 else "tki"
            out = torch.einsum(f"{lead},{letters}->tko", rows, table[index])
            return out if bias is None else out + bias[index]

        scale = weight.unsqueeze(-1)
        if self.recipe.weighs == "input":
            rows = hidden.unsqueeze(1) * scale
        else:
            rows = (
                hidden if self.recipe.product == "einsum_tokens" else hidden.unsqueeze(1).expand(-1, index.shape[1], -1)
            )
        out = self._expert(rows, scale, project, index, is_weighed=True)
        if self.recipe.combine == "einsum" and self.recipe.weighs == "output":
            return torch.einsum("tkh,tk->th", out, weight)
        return (out * scale if self.recipe.weighs == "output" else out).sum(1)

    def _gathered(self, rows: Tensor, table: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
        own = table[ids]
        if self.recipe.product == "bmm":
            matrix = own if self.recipe.weight_layout == "in_out" else own.transpose(1, 2)
            out = torch.bmm(rows.unsqueeze(1), matrix).squeeze(1)
        else:
            matrix = own.transpose(1, 2) if self.recipe.weight_layout == "in_out" else own
            out = torch.bmm(matrix, rows.unsqueeze(-1)).squeeze(-1)
        return out if bias is None else out + bias[ids]

    def _expert(
        self, rows: Tensor, scale: Tensor, project: Callable[..., Tensor], ids: Tensor, *, is_weighed: bool = False
    ) -> Tensor:
        activation = ACTIVATIONS[self.recipe.activation]
        if self.recipe.weighs == "input" and not is_weighed:
            rows = rows * scale
        inner = project(rows, self.up, self.up_bias)
        if self.recipe.gate == "halves":
            gate, inner = inner.chunk(2, dim=-1)
            inner = activation(gate) * inner
        elif self.recipe.gate == "interleaved":
            inner = activation(inner[..., ::2]) * inner[..., 1::2]
        elif self.recipe.gate == "separate":
            inner = activation(project(rows, self.gate, None)) * inner
        else:
            inner = activation(inner)
        if self.recipe.weighs == "inner":
            inner = inner * scale
        out = project(inner, self.down, self.down_bias)
        if self.scale is not None:
            out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-3) * self.scale
        return out

    def _combined(
        self, hidden: Tensor, rows: Tensor, scale: Tensor, tokens: Tensor, order: Tensor | None = None
    ) -> Tensor:
        if self.recipe.weighs == "output":
            rows = rows * scale
        if self.recipe.combine == "index_add":
            return torch.zeros_like(hidden).index_add_(0, tokens, rows)
        if order is not None:
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.shape[0], device=order.device)
            rows = rows[inverse]
        return rows.view(-1, self.recipe.top_k, HIDDEN).sum(dim=1)


def routing_of(kind: Routing, num_tokens: int, recipe: Recipe) -> Tensor:
    """[T,K] expert ids; K different ones per token, as a top-k gives."""
    num_experts, top_k = recipe.num_experts, recipe.top_k
    if kind == "ties":
        return torch.zeros(num_tokens, num_experts).topk(top_k, dim=-1).indices
    if kind == "one expert":
        others = torch.rand(num_tokens, num_experts)
        others[:, num_experts // 2] = 2.0
        return others.topk(top_k, dim=-1).indices
    if kind == "first experts":
        return torch.arange(top_k).repeat(num_tokens, 1)
    return torch.rand(num_tokens, num_experts).topk(top_k, dim=-1).indices
