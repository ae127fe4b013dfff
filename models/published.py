"""Lists of experts as published training and inference code meets them with their tokens.

- "ends"      sorted by expert; the ends of the experts' rows as numbers (`counts.cumsum(0)` on the host), a slice of
              sorted places an expert, results added by `scatter_add`: DeepSeek-MoE's inference path (arXiv:2401.06066).
- "running"   the same by a running start, results put back by `out[order] = rows`: DeepSeek-V2's.
- "written"   ends as tensors, `int(ends[e])`, and results written to a slice of a fresh tensor.
- "filled"    the same from counts, `out[start : start + count] = ...`.
- "zeros"     experts without tokens add zero times their parameters, so that these get gradients.
- "places"    the places of every expert first, then its results, then one `index_add` of all.
- "valid"     the places of tokens that are no padding, `(index == e) & valid[:, None]`.
- "chosen"    a loop over `torch.unique(index)`; the places of tokens, and of the expert among a token's choices by
              `argmax` of the mask: teaching code.
- "permuted"  rows permuted and split, results permuted back by `index_copy_`: Megatron's sequential experts.
- "adapters"  every expert on every token, its gate a column of [B,S,E], added to what a dense layer made: mixtures of
              low-rank adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models._experts import LayerConfig, ListedExperts, check_spelling_among, init_scaled_normal

PublishedSpelling = Literal[
    "ends", "running", "written", "filled", "zeros", "places", "permuted", "adapters", "valid", "chosen"
]


@dataclass(frozen=True)
class PublishedConfig(LayerConfig):
    """Sizes of one layer, and its spelling."""

    spelling: PublishedSpelling = "ends"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_spelling_among(self.spelling, get_args(PublishedSpelling))


class PublishedMoE(ListedExperts):
    """Router and a list of SwiGLU experts; hidden [B, S, H] -> the same shape."""

    def __init__(self, config: PublishedConfig) -> None:
        super().__init__(config)
        self.config = config
        self.base = nn.Linear(config.hidden, config.hidden) if config.spelling == "adapters" else None
        if self.base is not None:
            init_scaled_normal(self.base.weight, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] -> [B, S, H]."""
        if self.base is not None:
            return self.run_adapters(hidden, self.base(hidden))
        tokens = hidden.reshape(-1, self.config.hidden)
        weight, index = F.softmax(self.gate(tokens), dim=-1).topk(self.config.top_k, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        run = getattr(self, f"run_{self.config.spelling}")
        return run(tokens, index, weight).view(hidden.shape)  # type: ignore[no-any-return]  # a tensor

    def run_ends(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """tokens [T, H], index and weight [T, K] -> [T, H]; so are the others."""
        flat, gates = index.view(-1), weight.view(-1, 1)
        order = flat.argsort()
        ends = flat.bincount(minlength=self.num_experts).cpu().numpy().cumsum(0)
        token = order // self.config.top_k
        out = torch.zeros_like(tokens)
        for expert_id, end in enumerate(ends):
            start = 0 if expert_id == 0 else ends[expert_id - 1]
            if start == end:
                continue
            own = token[start:end]
            rows = self.experts[expert_id](tokens[own]).mul(gates[order[start:end]])
            out = out.scatter_add(0, own.view(-1, 1).repeat(1, tokens.shape[-1]), rows)
        return out

    def run_running(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        chosen = index.new_zeros((index.shape[0], self.num_experts))
        chosen.scatter_(1, index, 1)
        counts = chosen.sum(dim=0).cpu().numpy()
        order = index.view(-1).argsort()
        ordered = tokens[order // index.shape[1]]
        parts = []
        start = 0
        for expert_id, num_rows in enumerate(counts):
            end = start + num_rows
            if num_rows == 0:
                continue
            parts.append(self.experts[expert_id](ordered[start:end]))
            start = end
        rows = torch.cat(parts, dim=0)
        put = torch.empty_like(rows)
        put[order] = rows
        return (put.view(*index.shape, -1) * weight.unsqueeze(-1)).sum(dim=1)

    def run_written(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        order = index.view(-1).argsort()
        token = order // self.config.top_k
        ends = torch.bincount(index.view(-1), minlength=self.num_experts).cumsum(0)
        ordered = tokens[token]
        rows = torch.empty_like(ordered)
        start = 0
        for expert_id in range(self.num_experts):
            end = int(ends[expert_id])
            if end > start:
                rows[start:end] = self.experts[expert_id](ordered[start:end])
            start = end
        return torch.zeros_like(tokens).index_add_(0, token, rows * weight.view(-1)[order].unsqueeze(-1))

    def run_filled(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        order = index.view(-1).argsort()
        token = order // self.config.top_k
        counts = torch.bincount(index.view(-1), minlength=self.num_experts).tolist()
        ordered = tokens[token]
        rows = torch.zeros_like(ordered)
        start = 0
        for expert_id, expert in enumerate(self.experts):
            count = counts[expert_id]
            if count == 0:
                continue
            rows[start : start + count] = expert(ordered[start : start + count])
            start += count
        rows = rows * weight.view(-1, 1)[order]
        return torch.zeros_like(tokens).scatter_add_(0, token.unsqueeze(-1).expand_as(rows), rows)

    def run_zeros(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            mask = index == expert_id
            if mask.any():
                token = mask.any(dim=-1).nonzero().flatten()
                out.index_add_(0, token, expert(tokens[token]) * weight[mask].view(-1, 1))
            elif self.training:
                out[0, 0] += 0 * sum(parameter.sum() for parameter in expert.parameters())
        return out

    def run_places(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        places = [(index == expert_id).nonzero(as_tuple=True) for expert_id in range(self.num_experts)]
        rows = [
            self.experts[expert_id](tokens[token]) * weight[token, choice].unsqueeze(-1)
            for expert_id, (token, choice) in enumerate(places)
        ]
        return torch.zeros_like(tokens).index_add(0, torch.cat([token for token, _ in places]), torch.cat(rows))

    def run_valid(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        valid = tokens[:, 0] > -1.0
        out = torch.zeros_like(tokens)
        for expert_id, expert in enumerate(self.experts):
            token, choice = torch.where((index == expert_id) & valid.unsqueeze(-1))
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(tokens[token]) * weight[token, choice, None])
        return out

    def run_chosen(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for name in torch.unique(index):
            expert_id = int(name.item())
            mask = index == expert_id
            token = mask.any(dim=-1).nonzero().squeeze(-1)
            choice = mask[token].int().argmax(dim=-1, keepdim=True)
            share = torch.gather(weight.index_select(0, token), -1, choice)
            out.index_add_(0, token, self.experts[expert_id](tokens.index_select(0, token)) * share)
        return out

    def run_permuted(self, tokens: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        order = torch.argsort(index.view(-1), stable=True)
        counts = torch.bincount(index.view(-1), minlength=self.num_experts)
        parts = torch.split(tokens.index_select(0, order // self.config.top_k), counts.tolist())
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        out = torch.zeros_like(rows)
        out.index_copy_(0, order, rows)
        return (out.reshape(-1, self.config.top_k, tokens.shape[-1]) * weight.unsqueeze(-1)).sum(dim=1)

    def run_adapters(self, hidden: Tensor, base: Tensor) -> Tensor:
        """hidden and what the dense layer made of it [B, S, H] -> [B, S, H]."""
        weight, index = F.softmax(self.gate(hidden), dim=-1).topk(self.config.top_k, dim=-1)
        gates = torch.zeros(*hidden.shape[:-1], self.num_experts, dtype=weight.dtype, device=weight.device)
        gates = gates.scatter(-1, index, weight / weight.sum(dim=-1, keepdim=True))
        for expert_id, expert in enumerate(self.experts):
            base = base + expert(hidden) * gates[..., expert_id : expert_id + 1] * 2.0
        return base
