"""Weights of every expert, [T,E], in layers that run all experts on all tokens: steps equal those without us."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfine_fx
from memfine_fx import Config
from tests.helpers import HIDDEN, NUM_EXPERTS, WIDTH, hidden_states
from tests.integration.comparison import assert_same_step


class Weighed(nn.Module):
    """All experts on all tokens.

    Args:
        combine: of the layer, tokens [T,H] and weights [T,E], zero where an expert was not chosen.
        num_routed: experts that the router knows; those past the table's last do nothing.
    """

    def __init__(self, combine: Callable[[Weighed, Tensor, Tensor], Tensor], num_routed: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.combine, self.num_routed = combine, num_routed
        self.gate = nn.Linear(HIDDEN, num_routed)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / 4)

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.gate(hidden).softmax(-1)
        mask = F.one_hot(scores.topk(2, dim=-1).indices, self.num_routed).sum(1)
        return self.combine(self, hidden, scores * mask)


def turned(layer: Weighed, hidden: Tensor, weights: Tensor) -> Tensor:
    """Weights as [E,T], normalised over experts."""
    turned = weights.t()
    turned = turned / turned.sum(0, keepdim=True)
    rows = torch.bmm(torch.bmm(hidden.expand(NUM_EXPERTS, -1, -1), layer.up).relu(), layer.down)
    return (rows * turned.unsqueeze(-1)).sum(0)


def by_column(layer: Weighed, hidden: Tensor, weights: Tensor) -> Tensor:
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(hidden)
    for expert in range(NUM_EXPERTS):
        out = out + ((hidden @ layer.up[expert]).relu() @ layer.down[expert]) * weights[:, expert].unsqueeze(-1)
    return out


def assert_exact(layer: nn.Module, num_tokens: int) -> nn.Module:
    optimized = memfine_fx.optimize(copy.deepcopy(layer), config=Config(inner_backend="eager", rows_per_chunk=5))
    assert_same_step(optimized, layer, {"hidden": hidden_states(num_tokens)})
    return optimized


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
@pytest.mark.parametrize("num_tokens", [12, NUM_EXPERTS])
def test_turned_weights_are_never_those_of_other_tokens(num_tokens: int) -> None:
    assert_exact(Weighed(turned), num_tokens)


def test_a_router_may_know_more_experts_than_have_columns() -> None:
    (region,) = memfine_fx.report(assert_exact(Weighed(by_column, num_routed=8), 12)).regions
    assert region.status == "chunked"
