"""Code that several reference models share: routing rows to stacked experts, and the gated expert itself.

A spelling says how N = T * K routed rows meet the expert weights:

- "grouped" sorts the rows by expert, so that each expert owns a slice, and multiplies all slices in one
  `torch.nn.functional.grouped_mm`. torch takes float32, bfloat16 and float16 in eager mode, only bfloat16
  under compile, and rows of weights whose bytes are a multiple of 16.
- "gathered" keeps the token order, copies each row's own weights (`W[ids]`) and multiplies in one batched
  matmul. It takes every dtype, and memory in proportion to N * H * F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Spelling = Literal["grouped", "gathered"]


def check_routing(num_experts: int, top_k: int) -> None:
    """Raise ValueError unless each token can choose `top_k` different experts."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in 1..num_experts={num_experts}, got {top_k}")


def check_spelling(spelling: str) -> None:
    """Raise ValueError for a name that is no spelling."""
    if spelling not in ("grouped", "gathered"):
        raise ValueError(f'spelling must be "grouped" or "gathered", got {spelling!r}')


def check_spelling_among(spelling: str, spellings: tuple[str, ...]) -> None:
    """Raise ValueError for a name that is not one of a model's own spellings."""
    if spelling not in spellings:
        raise ValueError(f"spelling must be one of {spellings}, got {spelling!r}")


def upcast(x: Tensor) -> Tensor:
    """Routers compute in float32 at least, as the published models do; float64 stays as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax_top_k(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Mixtral's routing: logits [T, E] -> expert index [T, K] and weights [T, K] that sum to one."""
    probability = F.softmax(upcast(logits), dim=-1)
    weight, index = torch.topk(probability, top_k, dim=-1)
    return index, weight / weight.sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of one layer: H, F, E and K."""

    hidden: int = 64
    expert_width: int = 128
    num_experts: int = 8
    top_k: int = 2

    def __post_init__(self) -> None:
        check_routing(self.num_experts, self.top_k)


def init_scaled_normal(weight: Tensor, fan_in: int) -> None:
    """Fill `weight` so that unit-variance inputs give unit-variance outputs."""
    nn.init.normal_(weight, std=fan_in**-0.5)


@dataclass(frozen=True)
class SortedRows:
    """The "grouped" spelling: N rows in the order of their experts.

    permutation [N] maps sorted row to flat assignment t * K + k; expert_ids [N] ascend; offsets [E] int32
    hold the end of each expert's slice.
    """

    permutation: Tensor
    expert_ids: Tensor
    offsets: Tensor
    num_top_k: int

    @staticmethod
    def from_index(expert_index: Tensor, num_experts: int) -> SortedRows:
        """Sort the assignments of expert_index [T, K]."""
        expert_ids, permutation = torch.sort(expert_index.reshape(-1), stable=True)
        # histc takes no integers on CPU, and is not deterministic for floats on CUDA.
        countable = expert_ids.float() if expert_ids.device.type == "cpu" else expert_ids.int()
        counts = torch.histc(countable, bins=num_experts, min=0, max=num_experts - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        return SortedRows(permutation, expert_ids, offsets, expert_index.shape[-1])

    def take(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> rows [N, H]."""
        return hidden[self.permutation // self.num_top_k]

    def linear(self, rows: Tensor, weight: Tensor, *, is_transposed: bool = False) -> Tensor:
        """rows [N, in] with weight [E, out, in], or [E, in, out] when transposed -> [N, out]."""
        matrix = weight if is_transposed else weight.transpose(-2, -1)
        return F.grouped_mm(rows, matrix, offs=self.offsets)

    def combine(self, rows: Tensor, routing_weight: Tensor) -> Tensor:
        """rows [N, H] and routing_weight [T, K] -> weighted sums [T, H] in the dtype of the rows."""
        weighted = rows * routing_weight.reshape(-1)[self.permutation].unsqueeze(-1)
        inverse = torch.empty_like(self.permutation)
        inverse[self.permutation] = torch.arange(self.permutation.shape[0], device=inverse.device)
        return _sum_top_k(weighted[inverse], routing_weight).to(rows.dtype)


@dataclass(frozen=True)
class GatheredRows:
    """The "gathered" spelling: N rows in the order of their tokens, expert_ids [N]."""

    expert_ids: Tensor
    num_top_k: int

    @staticmethod
    def from_index(expert_index: Tensor) -> GatheredRows:
        """Flatten the assignments of expert_index [T, K]."""
        return GatheredRows(expert_index.reshape(-1), expert_index.shape[-1])

    def take(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] -> rows [N, H]."""
        return hidden.repeat_interleave(self.num_top_k, dim=0)

    def linear(self, rows: Tensor, weight: Tensor, *, is_transposed: bool = False) -> Tensor:
        """rows [N, in] with weight [E, out, in], or [E, in, out] when transposed -> [N, out]."""
        own_weight = weight[self.expert_ids]
        if is_transposed:
            return torch.bmm(rows.unsqueeze(1), own_weight).squeeze(1)
        return torch.bmm(own_weight, rows.unsqueeze(-1)).squeeze(-1)

    def combine(self, rows: Tensor, routing_weight: Tensor) -> Tensor:
        """rows [N, H] and routing_weight [T, K] -> weighted sums [T, H] in the dtype of the rows."""
        weighted = rows * routing_weight.reshape(-1).unsqueeze(-1)
        return _sum_top_k(weighted, routing_weight).to(rows.dtype)


def route_rows(spelling: Spelling, expert_index: Tensor, num_experts: int) -> SortedRows | GatheredRows:
    """The routed rows of expert_index [T, K] in the given spelling."""
    if spelling == "grouped":
        return SortedRows.from_index(expert_index, num_experts)
    return GatheredRows.from_index(expert_index)


def _sum_top_k(rows: Tensor, routing_weight: Tensor) -> Tensor:
    """rows [N, H] in token order -> [T, H]."""
    num_tokens, num_top_k = routing_weight.shape
    return rows.view(num_tokens, num_top_k, rows.shape[-1]).sum(dim=1)


class GatedExperts(nn.Module):
    """E SwiGLU experts in two stacked parameters: gate_up_proj [E, 2F, H] and down_proj [E, H, F]."""

    def __init__(self, num_experts: int, hidden: int, expert_width: int, spelling: Spelling) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.spelling: Spelling = spelling
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * expert_width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, expert_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate_up_proj, self.gate_up_proj.shape[-1])
        init_scaled_normal(self.down_proj, self.down_proj.shape[-1])

    def forward(self, hidden: Tensor, expert_index: Tensor, routing_weight: Tensor) -> Tensor:
        """hidden [T, H], expert_index [T, K], routing_weight [T, K] -> [T, H]."""
        routed = route_rows(self.spelling, expert_index, self.num_experts)
        gate, up = routed.linear(routed.take(hidden), self.gate_up_proj).chunk(2, dim=-1)
        return routed.combine(routed.linear(F.silu(gate) * up, self.down_proj), routing_weight)


class GatedMLP(nn.Module):
    """One SwiGLU expert as three linears: w2(silu(w1 x) * w3 x)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        for linear in (self.w1, self.w2, self.w3):
            init_scaled_normal(linear.weight, linear.in_features)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [R, H] -> [R, H]."""
        out: Tensor = self.w2(F.silu(self.w1(rows)) * self.w3(rows))
        return out


class ListedExperts(nn.Module):
    """A router and a list of SwiGLU experts; how they meet their tokens is the subclass's `forward`."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.gate = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(config.hidden, config.expert_width) for _ in range(config.num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.gate.in_features)
        for expert in self.experts:
            assert isinstance(expert, GatedMLP)
            expert.reset_parameters()


class StackedExperts(nn.Module):
    """A router and SwiGLU experts w1, w3 [E, H, F], w2 [E, F, H]; how they are used is the subclass's `forward`."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        num_experts, hidden, width = config.num_experts, config.hidden, config.expert_width
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again."""
        init_scaled_normal(self.gate.weight, self.gate.in_features)
        for weight in (self.w1, self.w2, self.w3):
            init_scaled_normal(weight, weight.shape[-2])
