"""Regions read off a graph: where they begin and end; one refusal for a routing decision that leads nowhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfine_fx.models import DeepseekConfig, DeepseekMoE
from memfine_fx.passes.dataflow import node_value
from memfine_fx.passes.ops import target_name
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.passes.read.seeds import seeds_of
from memfine_fx.records import MoERegion
from tests.helpers import (
    HIDDEN,
    GatheredMoE,
    GroupedMoE,
    TinyMoE,
    capture,
    hidden_for,
    hidden_states,
    only_region,
    refusals_of,
)


def names(nodes: object) -> list[str]:
    return [target_name(node) for node in nodes]  # type: ignore[attr-defined]  # nodes


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
def test_a_region_names_the_users_source_line(make: Callable[[], TinyMoE]) -> None:
    layer = make()
    source = only_region(capture(layer, hidden_for(layer))).where.source
    assert source.rpartition(":")[0].endswith("tests/helpers.py")


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
def test_a_cut_starts_at_the_index_and_ends_at_the_combined_tokens(make: Callable[[], TinyMoE]) -> None:
    layer = make()
    cut = only_region(capture(layer, hidden_for(layer))).cut
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
    cut = only_region(capture(layer, hidden_for(layer))).cut
    assert not {"topk", "gather", "linear", "truediv", "sigmoid"} & set(names(cut.nodes))
    assert "truediv" in names(cut.inputs)


def test_every_input_of_a_cut_is_read_inside_and_made_outside() -> None:
    cut = only_region(capture(GatheredMoE(), hidden_states())).cut
    inside = set(cut.nodes)
    assert all(source not in inside and inside & set(source.users) for source in cut.inputs)


def test_two_layers_are_two_regions_in_graph_order() -> None:
    model = nn.Sequential(GatheredMoE(), nn.Tanh(), GatheredMoE())
    first, second = read_regions(capture(model, hidden_states()))
    assert isinstance(first, MoERegion) and isinstance(second, MoERegion)
    assert not set(first.cut.nodes) & set(second.cut.nodes)
    assert second.hidden not in first.cut.nodes


def test_a_region_names_its_module_as_the_model_does() -> None:
    model = nn.Sequential(nn.Tanh(), GatheredMoE())
    assert only_region(capture(model, hidden_states())).where.module == "1"


def test_a_group_limited_router_with_several_top_ks_is_one_region() -> None:
    layer = DeepseekMoE(DeepseekConfig(hidden=16, expert_width=24, spelling="gathered"))
    graph_module = capture(layer, torch.randn(13, 16))
    assert sum(target_name(node) == "topk" for node in graph_module.graph.nodes) == 3
    (region,) = read_regions(graph_module)
    assert isinstance(region, MoERegion)


def test_experts_compiled_alone_are_found_by_their_index_argument() -> None:
    layer = GatheredMoE()
    index, weight = layer.route(hidden_states())
    graph_module = capture(layer.experts, hidden_states(), index, weight.detach())
    index_node = only_region(graph_module).expert_index
    assert index_node is not None and index_node.op == "placeholder"


def test_labels_are_no_routing_decision() -> None:
    layer, labels = GroupedMoE(), torch.randint(0, HIDDEN, (2, 8))

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(layer(hidden), labels.view(-1))

    graph_module = capture(loss, hidden_for(layer, 16), labels)
    (seed,) = seeds_of(graph_module.graph)
    assert only_region(graph_module).expert_index is seed and seed.op != "placeholder"


def test_a_dense_model_has_no_regions_and_no_refusals() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, 16), nn.GELU(), nn.Linear(16, HIDDEN))
    assert read_regions(capture(model, hidden_states())) == []


def test_an_unrelated_top_k_is_one_refusal_line() -> None:
    linear = nn.Linear(HIDDEN, HIDDEN)

    def function(hidden: Tensor) -> Tensor:
        best, index = linear(hidden).topk(2, dim=-1)
        return best * index.float()

    (refusal,) = read_regions(capture(function, hidden_states()))
    assert refusal.details == "topk: no expert matmul depends on it"  # type: ignore[union-attr]  # a refusal
    assert refusal.where.source.startswith(__file__)


def test_indices_that_leave_the_graph_are_explained() -> None:
    linear = nn.Linear(HIDDEN, HIDDEN)
    (refusal,) = refusals_of(capture(lambda hidden: linear(hidden).topk(2, dim=-1), hidden_states()))
    assert refusal.details == "topk: its indices leave the captured graph (a graph break before the experts?)"


def test_what_is_made_of_indices_and_leaves_the_graph_is_explained() -> None:
    linear = nn.Linear(HIDDEN, HIDDEN)

    def function(hidden: Tensor) -> Tensor:
        return linear(hidden).argmax(-1) + 1

    (refusal,) = refusals_of(capture(function, hidden_states()))
    assert "what is made of its indices leaves the captured graph" in refusal.details


def test_a_dispatch_by_mask_is_raised() -> None:
    gate, experts = nn.Linear(HIDDEN, 2), [nn.Linear(HIDDEN, HIDDEN) for _ in range(2)]

    def function(hidden: Tensor) -> Tensor:
        mask = F.one_hot(gate(hidden).argmax(dim=-1), 2)
        return sum(expert(hidden) * mask[:, place : place + 1] for place, expert in enumerate(experts))

    found = read_regions(capture(function, hidden_states()))
    assert found and all(isinstance(one, MoERegion) for one in found)


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
    assert refusal.details == "topk: it picks tokens, not an expert for each token"


def test_a_maximum_that_scales_the_results_does_not_own_grouped_experts() -> None:
    layer = GroupedMoE()

    def function(hidden: Tensor) -> Tensor:
        index, weight = layer.route(hidden)
        chosen = weight.max(dim=-1, keepdim=True)[1]
        return layer.experts(hidden, index, weight) * (chosen == 0)

    hidden = hidden_for(layer)
    (region,) = [one for one in read_regions(capture(function, hidden)) if isinstance(one, MoERegion)]
    assert region.expert_index is not None and "topk" in target_name(region.expert_index.args[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("reduce", [torch.max, torch.min])
def test_the_maximum_of_scores_is_no_refusal(reduce: Callable[..., tuple[Tensor, Tensor]]) -> None:
    linear = nn.Linear(HIDDEN, HIDDEN)
    graph_module = capture(lambda hidden: linear(hidden) - reduce(hidden, -1, keepdim=True)[0], hidden_states())
    assert read_regions(graph_module) == []


def test_an_embedding_of_token_ids_is_no_region() -> None:
    embedding = nn.Embedding(20, HIDDEN)
    graph_module = capture(lambda ids: F.relu(embedding(ids)), torch.randint(0, 20, (3, 5)))
    assert read_regions(graph_module) == []


def test_reading_changes_nothing() -> None:
    graph_module = capture(GatheredMoE(), hidden_states())
    before = graph_module.code, str(graph_module.graph)
    assert read_regions(graph_module) and read_regions(graph_module)
    assert (graph_module.code, str(graph_module.graph)) == before
