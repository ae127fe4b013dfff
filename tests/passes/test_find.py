"""Candidates by data flow: seeds, expert ops, cuts; one refusal for a routing decision that leads nowhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models import DeepseekConfig, DeepseekMoE
from memfine_fx.passes.dataflow import node_value, target_name
from memfine_fx.passes.find import find_candidates
from memfine_fx.records import Candidate
from tests.helpers import (
    HIDDEN,
    GatheredMoE,
    GroupedMoE,
    TinyMoE,
    capture,
    hidden_for,
    hidden_states,
    only_candidate,
    refusals_of,
)


def names(nodes: object) -> list[str]:
    return [target_name(node) for node in nodes]  # type: ignore[attr-defined]  # nodes


@pytest.mark.parametrize(
    ("make", "expert_op"), [(GatheredMoE, "bmm"), (GroupedMoE, "grouped_mm")], ids=["gathered", "grouped"]
)
def test_both_spellings_have_one_candidate_with_its_expert_matmuls(make: Callable[[], TinyMoE], expert_op: str) -> None:
    layer = make()
    candidate = only_candidate(capture(layer, hidden_for(layer)))
    assert len(candidate.expert_ops) == 2
    assert all(expert_op in name for name in names(candidate.expert_ops))


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
def test_a_candidate_names_the_users_source_line(make: Callable[[], TinyMoE]) -> None:
    layer = make()
    source = only_candidate(capture(layer, hidden_for(layer))).where.source
    assert source.rpartition(":")[0].endswith("tests/helpers.py")


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
def test_a_cut_starts_at_the_index_and_ends_at_the_combined_tokens(make: Callable[[], TinyMoE]) -> None:
    layer = make()
    cut = only_candidate(capture(layer, hidden_for(layer))).cuts[0]
    assert cut.nodes[-1] is cut.exit
    assert cut.expert_index in cut.inputs and cut.expert_index not in cut.nodes
    assert node_value(cut.expert_index).shape[1] == 2  # type: ignore[attr-defined]  # a tensor
    assert node_value(cut.exit).shape[1] == HIDDEN  # type: ignore[attr-defined]  # a tensor


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
def test_router_and_routing_weights_stay_outside(make: Callable[[], TinyMoE]) -> None:
    class Normalized(make):  # type: ignore[misc, valid-type]  # a class given as a parameter
        def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.gate(hidden).sigmoid()
            index = scores.topk(self.top_k, dim=-1).indices
            weight = scores.gather(1, index)
            return index, weight / weight.sum(dim=-1, keepdim=True)

    layer = Normalized()
    cut = only_candidate(capture(layer, hidden_for(layer))).cuts[0]
    assert not {"topk", "gather", "linear", "truediv", "sigmoid"} & set(names(cut.nodes))
    assert "truediv" in names(cut.inputs)


def test_every_input_of_a_cut_is_read_inside_and_made_outside() -> None:
    cut = only_candidate(capture(GatheredMoE(), hidden_states())).cuts[0]
    inside = set(cut.nodes)
    assert all(source not in inside and inside & set(source.users) for source in cut.inputs)


def test_two_layers_are_two_candidates_in_graph_order() -> None:
    model = nn.Sequential(GatheredMoE(), nn.Tanh(), GatheredMoE())
    candidates = find_candidates(capture(model, hidden_states()))
    assert [type(candidate) for candidate in candidates] == [Candidate, Candidate]
    first, second = candidates
    assert isinstance(first, Candidate) and isinstance(second, Candidate)
    assert not set(first.expert_ops) & set(second.expert_ops)
    assert not set(first.cuts[0].nodes) & set(second.cuts[0].nodes)


def test_a_candidate_names_its_module_as_the_model_does() -> None:
    model = nn.Sequential(nn.Tanh(), GatheredMoE())
    assert only_candidate(capture(model, hidden_states())).where.module == "1"


def test_a_group_limited_router_with_several_top_ks_is_one_candidate() -> None:
    layer = DeepseekMoE(DeepseekConfig(hidden=16, expert_width=24, spelling="gathered"))
    graph_module = capture(layer, torch.randn(13, 16))
    assert sum(target_name(node) == "topk" for node in graph_module.graph.nodes) == 3
    (candidate,) = find_candidates(graph_module)
    assert isinstance(candidate, Candidate)


def test_experts_compiled_alone_are_found_by_their_index_argument() -> None:
    layer = GatheredMoE()
    index, weight = layer.route(hidden_states())
    graph_module = capture(layer.experts, hidden_states(), index, weight.detach())
    candidate = only_candidate(graph_module)
    assert candidate.seed.op == "placeholder"


def test_a_dense_model_has_no_candidates_and_no_refusals() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, 16), nn.GELU(), nn.Linear(16, HIDDEN))
    assert find_candidates(capture(model, hidden_states())) == []


def test_an_unrelated_top_k_is_one_refusal_line() -> None:
    linear = nn.Linear(HIDDEN, HIDDEN)

    def function(hidden: Tensor) -> Tensor:
        best, index = linear(hidden).topk(2, dim=-1)
        return best * index.float()

    (refusal,) = find_candidates(capture(function, hidden_states()))
    assert refusal.reason == "topk: no expert matmul depends on it"  # type: ignore[union-attr]  # a refusal
    assert refusal.where.source.startswith(__file__)


def test_indices_that_leave_the_graph_are_explained() -> None:
    linear = nn.Linear(HIDDEN, HIDDEN)
    (refusal,) = refusals_of(capture(lambda hidden: linear(hidden).topk(2, dim=-1), hidden_states()))
    assert refusal.reason == "topk: its indices leave the captured graph (a graph break before the experts?)"


def test_a_dispatch_by_mask_is_proposed() -> None:
    gate, experts = nn.Linear(HIDDEN, 2), [nn.Linear(HIDDEN, HIDDEN) for _ in range(2)]

    def function(hidden: Tensor) -> Tensor:
        mask = F.one_hot(gate(hidden).argmax(dim=-1), 2)
        return sum(expert(hidden) * mask[:, place : place + 1] for place, expert in enumerate(experts))

    found = find_candidates(capture(function, hidden_states()))
    assert found and all(isinstance(one, Candidate) for one in found)


def test_tokens_picked_for_experts_are_told_from_experts_picked_for_tokens() -> None:
    gate, experts = nn.Linear(HIDDEN, 2), [nn.Linear(HIDDEN, HIDDEN) for _ in range(2)]

    def function(hidden: Tensor) -> Tensor:
        weight, token = gate(hidden).softmax(-1).topk(4, dim=0)
        out = torch.zeros_like(hidden)
        for place, expert in enumerate(experts):
            rows = expert(hidden[token[:, place]]) * weight[:, place : place + 1]
            out = out.index_add(0, token[:, place], rows)
        return out

    (refusal,) = refusals_of(capture(function, hidden_states()))
    assert refusal.reason == "topk: it picks tokens, not an expert for each token"


def test_a_maximum_that_scales_the_results_does_not_own_grouped_experts() -> None:
    layer = GroupedMoE()

    def function(hidden: Tensor) -> Tensor:
        index, weight = layer.route(hidden)
        chosen = weight.max(dim=-1, keepdim=True)[1]
        return layer.experts(hidden, index, weight) * (chosen == 0)

    hidden = hidden_for(layer)
    (candidate,) = [one for one in find_candidates(capture(function, hidden)) if isinstance(one, Candidate)]
    assert "topk" in target_name(candidate.seed.args[0])  # type: ignore[arg-type]  # a node


@pytest.mark.parametrize("reduce", [torch.max, torch.min])
def test_the_maximum_of_scores_is_no_refusal(reduce: Callable[..., tuple[Tensor, Tensor]]) -> None:
    linear = nn.Linear(HIDDEN, HIDDEN)
    graph_module = capture(lambda hidden: linear(hidden) - reduce(hidden, -1, keepdim=True)[0], hidden_states())
    assert find_candidates(graph_module) == []


def test_an_embedding_of_token_ids_is_no_candidate() -> None:
    embedding = nn.Embedding(20, HIDDEN)
    graph_module = capture(lambda ids: F.relu(embedding(ids)), torch.randint(0, 20, (3, 5)))
    assert find_candidates(graph_module) == []


def test_finding_changes_nothing() -> None:
    graph_module = capture(GatheredMoE(), hidden_states())
    before = graph_module.code, str(graph_module.graph)
    assert find_candidates(graph_module) and find_candidates(graph_module)
    assert (graph_module.code, str(graph_module.graph)) == before
