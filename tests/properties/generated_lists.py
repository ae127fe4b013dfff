"""Generated layers with a list of experts: how experts are stored, meet their tokens and return their results.

Legend: T tokens, H hidden, E experts, K top-k, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.properties.generated import ACTIVATIONS, HIDDEN, WIDTH, Routing, routing_of

__all__ = ["COMBINES", "GeneratedList", "ListRecipe", "logits_of"]

COMBINES: dict[str, tuple[str, ...]] = {
    "where": ("index_add", "add", "scatter"),
    "guarded": ("index_add", "add", "scatter"),
    "one_hot": ("index_add", "add", "scatter"),
    "nonzero": ("index_add", "add", "scatter"),
    "mask": ("add",),
    "guarded_mask": ("add",),
    "flat": ("sum",),
    "split": ("index_add", "put"),
    "places": ("index_add",),
    "every": ("sum",),
    "stacked": ("sum", "gather"),
}
"""Ways of taking an expert's rows, and the ways of returning results that go with each."""


@dataclass(frozen=True)
class ListRecipe:
    """One way of writing a layer.

    Args:
        take: a key of `COMBINES`.
        combine: one of its values.
        store: experts as "modules", as entries of "lists" of parameters, or of "stacks" [E,in,out].
        scores: "softmax" before the top-k, "renormed" to a sum of one, "after" it, or "sigmoid".
        weighs_input: the routing weight scales what an expert reads, not what it gives.
        residual: what results are added to: "zeros", tokens "before" the first or "after" the last of them, or "both".
        dtype: of weights and tokens.
    """

    take: str
    combine: str
    store: str
    activation: str
    is_gated: bool
    has_bias: bool
    scores: str
    weighs_input: bool
    dtype: torch.dtype
    num_experts: int
    top_k: int
    residual: str = "zeros"


class GeneratedList(nn.Module):
    """(hidden [T,H], logits [T,E]) -> [T,H]: a layer whose router's scores are an input."""

    def __init__(self, recipe: ListRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        inner = 2 * WIDTH if recipe.is_gated else WIDTH
        sizes = {"up": (HIDDEN, inner), "down": (WIDTH, HIDDEN)}
        tables = {name: torch.randn(recipe.num_experts, *size) / size[0] ** 0.5 for name, size in sizes.items()}
        if recipe.has_bias:
            tables |= {f"{name}_bias": torch.randn(recipe.num_experts, size[1]) / 2 for name, size in sizes.items()}
        for name, table in tables.items():
            self._store(name, table.to(recipe.dtype))

    def _store(self, name: str, table: Tensor) -> None:
        if self.recipe.store == "stacks":
            setattr(self, name, nn.Parameter(table))
        elif self.recipe.store == "lists":
            setattr(self, name, nn.ParameterList(nn.Parameter(one.clone()) for one in table))
        elif not name.endswith("_bias"):
            linears = [nn.Linear(*table.shape[1:], bias=self.recipe.has_bias, dtype=table.dtype) for _ in table]
            setattr(self, name, nn.ModuleList(linears))

    def _project(self, name: str, expert: int, rows: Tensor) -> Tensor:
        own = getattr(self, name)[expert]
        if self.recipe.store == "modules":
            result: Tensor = own(rows)
            return result
        result = rows @ own
        return result + getattr(self, f"{name}_bias")[expert] if self.recipe.has_bias else result

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        inner = self._project("up", expert, rows)
        activation = ACTIVATIONS[self.recipe.activation]
        if self.recipe.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            return self._project("down", expert, activation(gate) * inner)
        return self._project("down", expert, activation(inner))

    def _weighed(self, expert: int, rows: Tensor, scale: Tensor) -> Tensor:
        if self.recipe.weighs_input:
            return self._expert(expert, rows * scale)
        return self._expert(expert, rows) * scale

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        top_k, scores = self.recipe.top_k, self.recipe.scores
        if scores == "after":
            values, index = logits.topk(top_k, dim=-1)
            return index, values.softmax(dim=-1)
        weight, index = (logits.sigmoid() if scores == "sigmoid" else logits.softmax(dim=-1)).topk(top_k, dim=-1)
        return index, weight / weight.sum(dim=-1, keepdim=True) if scores == "renormed" else weight

    def forward(self, hidden: Tensor, logits: Tensor) -> Tensor:
        index, weight = self._route(logits)
        result: Tensor = getattr(self, f"_{self.recipe.take}")(hidden, index, weight)
        return hidden + result if self.recipe.residual in ("after", "both") else result

    def _start(self, hidden: Tensor) -> Tensor:
        return hidden * 2 if self.recipe.residual in ("before", "both") else torch.zeros_like(hidden)

    def _add(self, out: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        if self.recipe.combine == "index_add":
            return out.index_add_(0, token, rows)
        if self.recipe.combine == "scatter":
            return out.scatter_add(0, token.unsqueeze(-1).expand(-1, HIDDEN), rows)
        out[token] += rows
        return out

    def _where(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = self._start(hidden)
        for expert in range(self.recipe.num_experts):
            token, choice = torch.where(index == expert)
            out = self._add(out, token, self._weighed(expert, hidden[token], weight[token, choice, None]))
        return out

    def _guarded(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = self._start(hidden)
        for expert in range(self.recipe.num_experts):
            token, choice = torch.where(index == expert)
            if token.numel() == 0:
                continue
            out = self._add(out, token, self._weighed(expert, hidden[token], weight[token, choice, None]))
        return out

    def _one_hot(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = self._start(hidden)
        mask = F.one_hot(index, num_classes=self.recipe.num_experts).permute(2, 1, 0)
        for expert in range(self.recipe.num_experts):
            choice, token = torch.where(mask[expert])
            out = self._add(out, token, self._weighed(expert, hidden[token], weight[token, choice].unsqueeze(-1)))
        return out

    def _nonzero(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = self._start(hidden)
        for expert in range(self.recipe.num_experts):
            token, choice = (index == expert).nonzero(as_tuple=True)
            rows = hidden.index_select(0, token)
            out = self._add(out, token, self._weighed(expert, rows, weight[token, choice].unsqueeze(1)))
        return out

    def _mask(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = self._start(hidden)
        for expert in range(self.recipe.num_experts):
            own = (index == expert).any(dim=-1)
            share = (weight * (index == expert)).sum(dim=-1)
            out[own] += self._weighed(expert, hidden[own], share[own].unsqueeze(-1))
        return out

    def _guarded_mask(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = self._start(hidden)
        for expert in range(self.recipe.num_experts):
            own = (index == expert).any(dim=-1)
            if own.any():
                share = (weight * (index == expert)).sum(dim=-1)
                out[own] += self._weighed(expert, hidden[own], share[own].unsqueeze(-1))
        return out

    def _flat(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        rows, ids = hidden.repeat_interleave(self.recipe.top_k, dim=0), index.view(-1)
        out = torch.zeros_like(rows)
        for expert in range(self.recipe.num_experts):
            out[ids == expert] = self._weighed(expert, rows[ids == expert], weight.view(-1, 1)[ids == expert])
        return out.view(*index.shape, HIDDEN).sum(dim=1)

    def _split(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        order = index.view(-1).argsort(stable=True)
        counts = torch.bincount(index.view(-1), minlength=self.recipe.num_experts).tolist()
        scales = weight.view(-1, 1)[order].split(counts)
        parts = hidden[order // self.recipe.top_k].split(counts)
        rows = torch.cat([self._weighed(expert, *pair) for expert, pair in enumerate(zip(parts, scales, strict=True))])
        if self.recipe.combine == "index_add":
            return torch.zeros_like(hidden).index_add(0, order // self.recipe.top_k, rows)
        put = torch.empty_like(rows)
        put[order] = rows
        return put.view(*index.shape, HIDDEN).sum(dim=1)

    def _places(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        places = [torch.where(index == expert) for expert in range(self.recipe.num_experts)]
        rows = [
            self._weighed(expert, hidden[token], weight[token, choice, None])
            for expert, (token, choice) in enumerate(places)
        ]
        return torch.zeros_like(hidden).index_add(0, torch.cat([token for token, _ in places]), torch.cat(rows))

    def _every(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        gates = torch.zeros(hidden.shape[0], self.recipe.num_experts, dtype=weight.dtype).scatter(1, index, weight)
        out = self._start(hidden)
        for expert in range(self.recipe.num_experts):
            out = out + self._weighed(expert, hidden, gates[:, expert, None])
        return out

    def _stacked(self, hidden: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        rows = torch.stack([self._expert(expert, hidden) for expert in range(self.recipe.num_experts)], dim=1)
        if self.recipe.combine == "gather":
            chosen = rows.gather(1, index.unsqueeze(-1).expand(-1, -1, HIDDEN))
            return (chosen * weight.unsqueeze(-1)).sum(dim=1)
        gates = torch.zeros(hidden.shape[0], self.recipe.num_experts, dtype=weight.dtype).scatter(1, index, weight)
        return (rows * gates.unsqueeze(-1)).sum(dim=1)


def logits_of(kind: Routing, num_tokens: int, recipe: ListRecipe) -> Tensor:
    """[T,E] scores whose top-k is a routing of `kind`; equal scores where it says "ties"."""
    if kind == "ties":
        return torch.zeros(num_tokens, recipe.num_experts, dtype=recipe.dtype)
    index = routing_of(kind, num_tokens, recipe)
    favour = torch.zeros(num_tokens, recipe.num_experts).scatter(1, index, 4.0)
    return (torch.rand(num_tokens, recipe.num_experts) + favour).to(recipe.dtype)
