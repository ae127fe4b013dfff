"""Experts that several routers share: multi-gate mixtures (Ma et al., KDD 2018) with sparse gates.

All experts run on all tokens once, and each task weighs their results by gates of its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memfine_fx
from memfine_fx.memory.measure import trace_memory
from tests.integration.comparison import assert_same_step, optimized_copy

H, F, E, K = 16, 24, 4, 2


class MultiGate(nn.Module):
    """Two tasks; `combine` weighs the experts' results [T,E,H] by a task's gates [T,E]."""

    def __init__(self, combine: str, num_tasks: int = 2, hidden: int = H, width: int = F, num_experts: int = E) -> None:
        super().__init__()
        self.combine = combine
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, width), nn.ReLU(), nn.Linear(width, hidden)) for _ in range(num_experts)
        )
        self.gates = nn.ModuleList(nn.Linear(hidden, num_experts, bias=False) for _ in range(num_tasks))
        self.towers = nn.ModuleList(nn.Linear(hidden, 3) for _ in range(num_tasks))

    def weights(self, gate: nn.Module, x: Tensor) -> Tensor:
        logits = gate(x)
        scores, index = logits.topk(K, dim=-1)
        return torch.full_like(logits, float("-inf")).scatter(-1, index, scores).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        results = torch.stack([expert(x) for expert in self.experts], dim=1)
        outs = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = self.weights(gate, x)
            if self.combine == "einsum":
                out = torch.einsum("te,teh->th", weights, results)
            elif self.combine == "sum":
                out = (weights.unsqueeze(-1) * results).sum(dim=1)
            else:
                out = torch.bmm(weights.unsqueeze(1), results).squeeze(1)
            outs.append(tower(out))
        return torch.cat(outs, dim=-1)


@pytest.mark.parametrize(("combine", "num_tasks"), [("einsum", 2), ("sum", 2), ("bmm", 2), ("einsum", 3)])
def test_each_task_computes_the_experts_that_its_tokens_chose(combine: str, num_tasks: int) -> None:
    model = MultiGate(combine, num_tasks)
    optimized = optimized_copy(model, rows_per_chunk=3)
    for num_tokens in (20, 7):
        assert_same_step(optimized, model, {"x": torch.randn(num_tokens, H)})
    with torch.no_grad():
        for module in (model, optimized):
            module.gates[0].weight.zero_()  # type: ignore[index,union-attr]  # ties: all tokens choose the same experts
    assert_same_step(optimized, model, {"x": torch.randn(20, H)})
    assert memfine_fx.report(optimized).num_chunked == num_tasks


def test_no_result_of_all_experts_is_left_where_every_task_has_a_region() -> None:
    model = MultiGate("einsum", hidden=64, width=256, num_experts=16)
    optimized = optimized_copy(model, rows_per_chunk=64)
    x = torch.randn(512, 64)

    def peak(module: nn.Module) -> int:
        step = lambda: module(x).sum().backward()  # noqa: E731  # one expression
        step()
        return trace_memory(step, torch.device("cpu")).peak_bytes

    assert peak(optimized) < 0.5 * peak(model)


class Written(MultiGate):
    """The same, with results that are written into one tensor in place."""

    def forward(self, x: Tensor) -> Tensor:
        results = x.new_zeros(x.shape[0], E, H)
        for e, expert in enumerate(self.experts):
            results[:, e] = expert(x)
        outs = [torch.einsum("te,teh->th", self.weights(gate, x), results) for gate in self.gates]
        return torch.cat(outs, dim=-1)


class Chained(MultiGate):
    """What the first task combines is what the second begins with."""

    def forward(self, x: Tensor) -> Tensor:
        results = torch.stack([expert(x) for expert in self.experts], dim=1)
        first = torch.einsum("te,teh->th", self.weights(self.gates[0], x), results)
        second = torch.einsum("te,teh->th", self.weights(self.gates[1], first), results)
        return torch.cat([first, second], dim=-1)


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
@pytest.mark.parametrize("layer_class", [Written, Chained])
def test_other_ways_to_share_experts_are_exact(layer_class: type[MultiGate]) -> None:
    model = layer_class("einsum")
    optimized = optimized_copy(model, rows_per_chunk=3)
    assert_same_step(optimized, model, {"x": torch.randn(20, H)})
    layers = memfine_fx.report(optimized).layers
    assert all(layer.status == "chunked" or layer.reason for layer in layers), layers
