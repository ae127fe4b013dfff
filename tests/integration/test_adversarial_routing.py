"""Routing that breaks chunk loops: the index is an input, so that every extreme can be asked for."""

from __future__ import annotations

import pytest
import torch

import memfine_fx
from memfine_fx.demo.tiny import tiny_causal_lm
from tests.integration.comparison import assert_same_step, optimized_copy

T, H, E, K = 24, 32, 4, 2


def _all_to_one() -> torch.Tensor:
    return torch.tensor([[3, 0]]).expand(T, K).contiguous()


def _one_expert_hot() -> torch.Tensor:
    return torch.stack([torch.full((T,), 2), torch.arange(T) % 2], dim=1)


def _empty_experts() -> torch.Tensor:
    return torch.tensor([[0, 3]]).repeat(T, 1)


def _ties() -> torch.Tensor:
    return torch.zeros(T, E).topk(K, dim=-1).indices


def _same_expert_twice() -> torch.Tensor:
    return torch.randint(0, E, (T, 1)).repeat(1, K)


def _balanced() -> torch.Tensor:
    return torch.rand(T, E).topk(K, dim=-1).indices


ROUTINGS = [_all_to_one, _one_expert_hot, _empty_experts, _ties, _same_expert_twice, _balanced]


def experts_of(family: str, spelling: str) -> torch.nn.Module:
    model = tiny_causal_lm(family, experts_implementation=spelling)
    return next(module for module in model.modules() if type(module).__name__.endswith("Experts"))


def inputs_for(index: torch.Tensor) -> dict[str, torch.Tensor]:
    num_tokens, top_k = index.shape
    return {
        "hidden_states": torch.randn(num_tokens, H),
        "top_k_index": index,
        "top_k_weights": torch.rand(num_tokens, top_k),
    }


@pytest.mark.parametrize("axis", ["rows", "tokens"])
@pytest.mark.parametrize(("family", "spelling"), [("qwen3_moe", "grouped_mm"), ("gpt_oss", "batched_mm")])
def test_gradients_under_extreme_routing_which_makes_no_new_graph(family: str, spelling: str, axis: str) -> None:
    layer = experts_of(family, spelling)
    optimized = optimized_copy(layer, axis=axis, rows_per_chunk=5)
    for routing in ROUTINGS:
        assert_same_step(optimized, layer, inputs_for(routing()))
    report = memfine_fx.report(optimized)
    assert (report.num_chunked, report.num_graphs) == (1, 1)


@pytest.mark.parametrize("spelling", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k"), [(1, 2), (1, 1), (7, 1), (5, E), (E, 1), (E, 2)], ids=lambda size: str(size)
)
def test_gradients_at_the_corners_of_t_and_k(num_tokens: int, top_k: int, spelling: str) -> None:
    layer = experts_of("qwen3_moe", spelling)
    optimized = optimized_copy(layer, rows_per_chunk=3)
    index = torch.rand(num_tokens, E).topk(top_k, dim=-1).indices
    assert_same_step(optimized, layer, inputs_for(index))
    assert memfine_fx.report(optimized).num_chunked == 1


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
@pytest.mark.parametrize("spelling", ["grouped_mm", "batched_mm"])
def test_zero_tokens_give_zero_gradients(spelling: str) -> None:
    layer = experts_of("qwen3_moe", spelling)
    optimized = optimized_copy(layer)
    inputs = inputs_for(torch.zeros(0, K, dtype=torch.int64))
    assert_same_step(optimized, layer, inputs)
