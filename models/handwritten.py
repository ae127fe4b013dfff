"""More ways in which a list of experts meets its tokens, as small repositories and teaching code write them.

- "gates"     gates [B,S,E] by a softmax over scattered scores; a boolean mask over [B,S], the expert's own column
              of the gates, experts without tokens skipped with `if mask.any()`.
- "sequence"  `torch.where` over an index [B,S,K]: three coordinates, tokens never flattened.
- "choices"   a loop over a token's choices around the loop over experts.
- "named"     a loop over `index.unique()`.
- "lists"     places as Python lists (`.tolist()`): the first Mixtral in transformers.
- "counted"   experts skipped where `bincount(index).tolist()` says zero: DeepSeek-V3's published inference code.
- "scatter"   results returned by `scatter_add` along the rows.
- "picked"    every expert on every token, the chosen results gathered.
- "pairs"     the same, picked by `results[arange(T)[:, None], index]`.
- "turned"    the same with experts and choices before tokens, `results[index.t(), arange(T)]`.
- "along"     the same by `take_along_dim`.
- "members"   a mask [T,E] of the chosen, `one_hot(index).sum(1)`; rows read, added to and written back.
- "capacity"  top-1 with a one-hot mask [B,S,E] that drops what exceeds an expert's capacity: Switch (arXiv:2101.03961)
              as in older versions of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.models._experts import LayerConfig, ListedExperts, check_spelling_among

HandwrittenSpelling = Literal[
    "gates", "sequence", "choices", "named", "lists", "counted", "scatter", "picked", "pairs", "turned", "along",
    "members", "capacity",
]  # fmt: skip


@dataclass(frozen=True)
class HandwrittenConfig(LayerConfig):
    """Sizes of one layer, and its spelling; `capacity` counts rows per expert and sequence."""

    capacity: int = 4
    spelling: HandwrittenSpelling = "gates"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_spelling_among(self.spelling, get_args(HandwrittenSpelling))


class HandwrittenMoE(ListedExperts):
    """Router and a list of SwiGLU experts; hidden [B, S, H] -> the same shape."""

    def __init__(self, config: HandwrittenConfig) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] -> [B, S, H]."""
        run = getattr(self, f"run_{self.config.spelling}")
        if self.config.spelling in ("gates", "sequence", "picked", "capacity"):
            return run(hidden)  # type: ignore[no-any-return]  # a tensor
        tokens = hidden.reshape(-1, self.config.hidden)
        return run(tokens, *self.route(tokens)).view(hidden.shape)  # type: ignore[no-any-return]  # a tensor

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [..., H] -> index [..., K] and weight [..., K]."""
        weight, index = F.softmax(self.gate(hidden), dim=-1).topk(self.config.top_k, dim=-1)
        return index, weight / weight.sum(dim=-1, keepdim=True)

    def run_gates(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] -> [B, S, H]; so are "sequence", "picked" and "capacity"."""
        logits = self.gate(hidden)
        scores, index = logits.topk(self.config.top_k, dim=-1)
        gates = F.softmax(torch.full_like(logits, float("-inf")).scatter(-1, index, scores), dim=-1)
        flat_tokens, flat_gates = hidden.view(-1, hidden.shape[-1]), gates.view(-1, self.num_experts)
        out = torch.zeros_like(hidden)
        for expert_id, expert in enumerate(self.experts):
            mask = (index == expert_id).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                rows = expert(flat_tokens[flat_mask])
                out[mask] += rows * flat_gates[flat_mask, expert_id].unsqueeze(1)
        return out

    def run_sequence(self, hidden: Tensor) -> Tensor:
        index, weight = self.route(hidden)
        out = torch.zeros_like(hidden)
        for expert_id, expert in enumerate(self.experts):
            row, place, choice = torch.where(index == expert_id)
            out[row, place] += expert(hidden[row, place]) * weight[row, place, choice].unsqueeze(-1)
        return out

    def run_picked(self, hidden: Tensor) -> Tensor:
        index, weight = self.route(hidden)
        results = torch.stack([expert(hidden) for expert in self.experts], dim=-2)
        chosen = torch.gather(results, -2, index.unsqueeze(-1).expand(*index.shape, hidden.shape[-1]))
        return (chosen * weight.unsqueeze(-1)).sum(dim=-2)

    def run_capacity(self, hidden: Tensor) -> Tensor:
        probability = F.softmax(self.gate(hidden), dim=-1)
        mask = F.one_hot(probability.argmax(dim=-1), self.num_experts)
        mask = mask * (mask.cumsum(dim=-2) <= self.config.capacity)
        out = torch.zeros_like(hidden)
        for expert_id, expert in enumerate(self.experts):
            own = mask[:, :, expert_id].bool()
            out[own] = expert(hidden[own])
        return out * probability.max(dim=-1, keepdim=True).values

    def run_choices(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """tokens [T, H], index and weight [T, K] -> [T, H]; so are the others."""
        out = torch.zeros_like(tokens)
        for choice in range(self.config.top_k):
            for expert_id, expert in enumerate(self.experts):
                own = index[:, choice] == expert_id
                out[own] += weight[own, choice].unsqueeze(-1) * expert(tokens[own])
        return out

    def run_named(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert_id in index.unique():  # type: ignore[no-untyped-call]  # as torch has it
            token, choice = torch.where(index == expert_id)
            out.index_add_(0, token, self.experts[expert_id](tokens[token]) * weight[token, choice, None])
        return out

    def run_lists(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        mask = F.one_hot(index, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_id in range(self.num_experts):
            choice, token = torch.where(mask[expert_id])
            if token.shape[0] == 0:
                continue
            token_list, choice_list = token.tolist(), choice.tolist()
            rows = tokens[None, token_list].reshape(-1, tokens.shape[-1])
            out.index_add_(0, token, self.experts[expert_id](rows) * weight[token_list, choice_list, None])
        return out

    def run_counted(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        counts = torch.bincount(index.flatten(), minlength=self.num_experts).tolist()
        for expert_id in range(self.num_experts):
            if counts[expert_id] == 0:
                continue
            token, choice = torch.where(index == expert_id)
            out[token] += self.experts[expert_id](tokens[token]) * weight[token, choice, None]
        return out

    def run_scatter(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            token, choice = (index == expert_id).nonzero(as_tuple=True)
            rows = expert(tokens.index_select(0, token)) * weight[token, choice].unsqueeze(-1)
            out = out.scatter_add(0, token.unsqueeze(-1).expand(-1, tokens.shape[-1]), rows)
        return out

    def run_pairs(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        results = torch.stack([expert(tokens) for expert in self.experts], dim=1)
        chosen = results[torch.arange(tokens.shape[0], device=tokens.device).unsqueeze(1), index]
        return (chosen * weight.unsqueeze(-1)).sum(dim=1)

    def run_turned(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        results = torch.stack([expert(tokens) for expert in self.experts])
        chosen = results[index.t(), torch.arange(tokens.shape[0], device=tokens.device)]
        return (chosen * weight.t().unsqueeze(-1)).sum(dim=0)

    def run_along(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        results = torch.stack([expert(tokens) for expert in self.experts], dim=1)
        return torch.einsum("tk,tkh->th", weight, torch.take_along_dim(results, index.unsqueeze(-1), dim=1))

    def run_members(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        members = F.one_hot(index, self.num_experts).sum(dim=1)
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            token = members[:, expert_id].bool().nonzero().squeeze(-1)
            own = (weight * (index == expert_id)).sum(dim=-1)
            out[token] = out[token] + expert(tokens[token]) * own[token].unsqueeze(-1)
        return out
