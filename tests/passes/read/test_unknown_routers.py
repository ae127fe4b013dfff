"""Operators that choose experts and that nothing reads as a choice: refused by name, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfine_fx
from memfine_fx.models import MixtralConfig, MixtralMoE

E, H, WIDTH, K = 4, 8, 16, 2


def multinomial(scores: Tensor) -> Tensor:
    return torch.multinomial(scores.softmax(-1), K)


def sorted_last(scores: Tensor) -> Tensor:
    return scores.sort(dim=-1).indices[:, -K:]


def argsorted(scores: Tensor) -> Tensor:
    return scores.argsort(dim=-1)[:, -K:]


def bucketized(scores: Tensor) -> Tensor:
    return torch.bucketize(scores[:, :K].contiguous(), torch.tensor([-0.5, 0.0, 0.5], dtype=scores.dtype))


def grouped(experts: Experts, tokens: Tensor, ids: Tensor) -> Tensor:
    order = ids.flatten().argsort()
    counts = torch.histc(ids.flatten().float(), E, 0, E - 1)
    rows = torch._grouped_mm(tokens[order // K], experts.up, counts.cumsum(0).int())
    rows = torch._grouped_mm(rows.relu(), experts.down, counts.cumsum(0).int())
    return torch.zeros_like(tokens).index_add_(0, order // K, rows)


def gathered(experts: Experts, tokens: Tensor, ids: Tensor) -> Tensor:
    hidden = torch.einsum("th,tkhf->tkf", tokens, experts.up[ids]).relu()
    return torch.einsum("tkf,tkfh->th", hidden, experts.down[ids])


def masked(experts: Experts, tokens: Tensor, ids: Tensor) -> Tensor:
    mask = F.one_hot(ids, E).sum(1).to(tokens.dtype)
    hidden = torch.einsum("th,ehf->etf", tokens, experts.up).relu()
    return torch.einsum("etf,efh,te->th", hidden, experts.down, mask)


class Experts(nn.Module):
    def __init__(
        self, choose: Callable[[Tensor], Tensor], run: Callable[[Experts, Tensor, Tensor], Tensor] = gathered
    ) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, H, WIDTH)), nn.Parameter(torch.randn(E, WIDTH, H))
        self.choose, self.run = choose, run

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(self, tokens, self.choose(self.router(tokens)))


@pytest.mark.parametrize("run", [grouped, gathered, masked])
@pytest.mark.parametrize(
    ("choose", "name"),
    [(multinomial, "multinomial"), (sorted_last, "sort"), (argsorted, "argsort"), (bucketized, "bucketize")],
)
def test_an_unknown_router_is_refused_by_name(
    choose: Callable[[Tensor], Tensor], name: str, run: Callable[[Experts, Tensor, Tensor], Tensor]
) -> None:
    report = memfine_fx.explain(Experts(choose, run).bfloat16(), torch.randn(16, H, dtype=torch.bfloat16))
    (refusal,) = report.regions
    assert refusal.status == "refused" and refusal.refused_for == "UNKNOWN_ROUTER"
    assert refusal.reason.startswith(f"{name} chooses experts")


class Sampling(nn.Module):
    """Draws tokens and embeds them; sorts scores for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, H), nn.Linear(H, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.head(tokens)
        drawn = self.embedding(torch.multinomial(scores.softmax(-1), 1).squeeze(-1))
        ranks = scores.gather(-1, scores.argsort(-1))
        return self.head(tokens + drawn).sum() + ranks[:, 0].sum()


def test_what_is_drawn_and_sorted_for_no_experts_is_no_router() -> None:
    assert memfine_fx.explain(Sampling(), torch.randn(16, H)).regions == ()


def test_what_a_raised_layer_sorts_is_no_router() -> None:
    model = MixtralMoE(MixtralConfig(hidden=H, expert_width=WIDTH, num_experts=E, top_k=K, spelling="gathered"))
    (region,) = memfine_fx.explain(model, torch.randn(16, H)).regions
    assert region.status == "chunked"
