"""A Mixtral-like layer whose experts are an nn.ModuleList, in the ways people loop over them.

The spelling says how an expert meets its tokens and how its results return:

- "where"    `torch.where(index == e)`, `index_add_`: the first Mixtral port.
- "one_hot"  a one-hot mask [E, K, T], `torch.where(mask[e])`: transformers before its experts interface.
- "add"      `res[b] += ...` with `b, k = torch.where(index == e)`: mixtral in plain PyTorch repositories.
- "any"      a boolean mask over tokens and the weight summed under it.
- "flat"     assignments flattened, `y[flat == e] = expert(x[flat == e])`, weighted and summed at the end:
             DeepSeek-MoE's training path (arXiv:2401.06066).
- "guarded"  as "where", but experts without tokens are skipped with `continue`.
- "hit"      as "one_hot", over the experts that have tokens alone (`for e in hit`).
- "asked"    as "guarded", where the condition asks `(index == e).any()` and the places are searched afterwards.
- "results"  as "flat", where experts without tokens run on none and add zero times their parameters: minimind.
- "split"    tokens sorted by expert, split by `bincount(...).tolist()`, concatenated: DeepSeek's inference path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from memfine_fx.models._experts import LayerConfig, ListedExperts, check_spelling_among, softmax_top_k

LoopSpelling = Literal["where", "one_hot", "add", "any", "flat", "guarded", "hit", "split", "asked", "results"]


@dataclass(frozen=True)
class LoopConfig(LayerConfig):
    """Sizes of one layer, and its spelling."""

    spelling: LoopSpelling = "where"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_spelling_among(self.spelling, get_args(LoopSpelling))


class LoopMoE(ListedExperts):
    """Router and a list of experts; hidden [B, S, H] or [T, H] -> the same shape."""

    def __init__(self, config: LoopConfig) -> None:
        super().__init__(config)
        self.config = config
        self.top_k = config.top_k

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] or [T, H] -> the same shape."""
        tokens = hidden.reshape(-1, self.config.hidden)
        index, weight = softmax_top_k(self.gate(tokens), self.top_k)
        out: Tensor = getattr(self, f"run_{self.config.spelling}")(tokens, index, weight.to(tokens.dtype))
        return out.view(hidden.shape)

    def run_where(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """tokens [T, H], index and weight [T, K] -> [T, H]; so are the others."""
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            token, choice = torch.where(index == expert_id)
            out.index_add_(0, token, expert(tokens[token]) * weight[token, choice, None])
        return out

    def run_one_hot(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        mask = nn.functional.one_hot(index, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_id in range(self.num_experts):
            choice, token = torch.where(mask[expert_id])
            rows = self.experts[expert_id](tokens[None, token].reshape(-1, tokens.shape[-1]))
            out.index_add_(0, token, rows * weight[token, choice, None])
        return out

    def run_add(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            token, choice = torch.where(index == expert_id)
            out[token] += weight[token, choice, None] * expert(tokens[token])
        return out

    def run_any(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            chosen = (index == expert_id).any(dim=-1)
            share = (weight * (index == expert_id)).sum(dim=-1)
            out[chosen] += expert(tokens[chosen]) * share[chosen].unsqueeze(-1)
        return out

    def run_flat(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        flat = index.view(-1)
        rows = tokens.repeat_interleave(self.top_k, dim=0)
        out = torch.empty_like(rows)
        for expert_id, expert in enumerate(self.experts):
            out[flat == expert_id] = expert(rows[flat == expert_id])
        return (out.view(*weight.shape, tokens.shape[-1]) * weight.unsqueeze(-1)).sum(dim=1)

    def run_guarded(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            token, choice = torch.where(index == expert_id)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(tokens[token]) * weight[token, choice, None])
        return out

    def run_hit(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        mask = nn.functional.one_hot(index, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_id in hit:
            choice, token = torch.where(mask[expert_id].squeeze(0))
            rows = self.experts[expert_id](tokens[token])
            out.index_add_(0, token, rows * weight[token, choice, None])
        return out

    def run_split(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        flat = index.view(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=self.num_experts).tolist()
        token = order // self.top_k
        parts = torch.split(tokens[token], counts)
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(tokens).index_add_(0, token, rows * weight.view(-1)[order].unsqueeze(-1))

    def run_asked(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            if not (index == expert_id).any():
                continue
            token, choice = torch.where(index == expert_id)
            out.index_add_(0, token, expert(tokens[token]) * weight[token, choice, None])
        return out

    def run_results(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        flat = index.view(-1)
        rows = tokens.repeat_interleave(self.top_k, dim=0)
        out = torch.empty_like(rows)
        for expert_id, expert in enumerate(self.experts):
            result = expert(rows[flat == expert_id])
            if result.shape[0] > 0:
                out[flat == expert_id] = result
            else:
                out[flat == expert_id] = result + 0 * sum(parameter.sum() for parameter in expert.parameters())
        return (out.view(*weight.shape, tokens.shape[-1]) * weight.unsqueeze(-1)).sum(dim=1)
