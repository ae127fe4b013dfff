"""Lowering: two calls in place of the region, a valid graph, and a control rewrite that changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.passes.lower.region import lower_region
from memfine_fx.passes.ops import target_name
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.records import ChunkPlan, MoERegion
from memfine_fx.runtime import store
from memfine_fx.runtime.store import LiveRegion, register
from tests.helpers import (
    NUM_EXPERTS,
    GatheredMoE,
    GroupedMoE,
    TinyMoE,
    capture,
    compiled_expert_of,
    hidden_for,
    hidden_states,
    insert_identity,
    largest_error,
    only_region,
)

SITE = "test_lower/0"
HELD: list[LiveRegion] = []
"""Registered regions, which live as long as somebody holds them."""
MEMFINE_OPS = (torch.ops.memfine.route.default, torch.ops.memfine.experts.default)


def captured(layer: TinyMoE) -> tuple[fx.GraphModule, MoERegion]:
    """A graph and its region, which is live under SITE: lowering asks the op for the shape of its result."""
    graph_module = capture(layer, hidden_for(layer))
    region = only_region(graph_module)
    register_live(layer, region)
    return graph_module, region


@pytest.fixture(autouse=True)
def _forget_region() -> Iterator[None]:
    yield
    HELD.clear()
    with contextlib.suppress(KeyError):
        store.unregister(SITE)


def register_live(layer: TinyMoE, region: MoERegion, rows: int = 3, region_id: str = SITE) -> None:
    params = [layer.up.detach(), layer.down.detach()]
    function = region.expert_fn
    compiled_expert = compiled_expert_of(
        function.graph_module, params, function.param_kinds, has_weight=function.has_weight
    )
    plan = ChunkPlan("rows", rows, 0, 0, "")
    live = LiveRegion(
        region_id=region_id,
        compiled_expert=compiled_expert,
        num_experts=NUM_EXPERTS,
        top_k=layer.top_k,
        out_dtype=layer.up.dtype,
        out_of_range="error",
        choose_plan=lambda num_tokens: plan,
    )
    HELD.append(live)
    register(live)


def run(graph_module: fx.GraphModule, layer: TinyMoE, hidden: Tensor) -> Tensor:
    """Call a captured graph with the layer's parameters, found by the names of its placeholders."""
    named = {"_gate_": layer.gate.weight, "_up_": layer.up, "_down_": layer.down}
    args: list[object] = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["example_value"], Tensor):
            args.append(next((tensor for name, tensor in named.items() if name in str(node.target)), hidden))
        else:
            args.append(hidden.shape[0])
    (out,) = graph_module(*args)
    return out


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
def test_the_region_becomes_two_calls(make: Callable[[], TinyMoE]) -> None:
    graph_module, region = captured(make())
    lower_region(graph_module, region, SITE)
    names = [target_name(node) for node in graph_module.graph.nodes if node.op.startswith("call")]
    assert names[-4:] == ["route", "getitem", "getitem", "experts"]
    gone = {"bmm", "sort", "_grouped_mm", "grouped_mm", "index_add", "repeat_interleave", "histc", "relu"}
    assert not gone & set(names)
    graph_module.graph.lint()


def test_the_calls_name_the_regions_tensors() -> None:
    graph_module, region = captured(GatheredMoE())
    lower_region(graph_module, region, SITE)
    route, order, offsets, experts = list(graph_module.graph.nodes)[-5:-1]
    assert route.args == (region.expert_index, NUM_EXPERTS)
    assert experts.args == (region.hidden, region.routing_weight, order, offsets, list(region.params), SITE)


def test_new_nodes_carry_values_and_provenance() -> None:
    graph_module, region = captured(GatheredMoE())
    lower_region(graph_module, region, SITE)
    route, order, offsets, experts = list(graph_module.graph.nodes)[-5:-1]
    assert all(node.meta["example_value"] is not None and node.stack_trace for node in (route, experts))
    assert order.meta["example_value"].dtype is torch.int32
    assert offsets.meta["example_value"].shape == (NUM_EXPERTS + 1,)
    assert experts.meta["example_value"].shape == region.cut.exit.meta["example_value"].shape


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
def test_a_lowered_graph_holds_no_candidate(make: Callable[[], TinyMoE]) -> None:
    graph_module, region = captured(make())
    lower_region(graph_module, region, SITE)
    assert not [found for found in read_regions(graph_module) if isinstance(found, MoERegion)]


def test_a_lowered_layer_gives_nothing_to_lower_when_it_is_captured_again() -> None:
    layer = GatheredMoE()
    graph_module, region = captured(layer)
    register_live(layer, region)
    lower_region(graph_module, region, SITE)
    again = capture(lambda hidden: run(graph_module, layer, hidden), hidden_states())
    assert any(target_name(node) == "experts" for node in again.graph.nodes)
    assert not [found for found in read_regions(again) if isinstance(found, MoERegion)]


def test_a_lowered_graph_computes_the_same() -> None:
    layer = GatheredMoE()
    graph_module, region = captured(layer)
    register_live(layer, region)
    lower_region(graph_module, region, SITE)
    for num_tokens in (13, 5, 1):
        hidden = hidden_states(num_tokens)
        assert largest_error(run(graph_module, layer, hidden), layer(hidden)) < 1e-5


def test_what_others_read_of_the_region_stays() -> None:
    class SharedSort(GroupedMoE):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            index, _ = self.route(hidden)
            ids, order = index.reshape(-1).sort(stable=True)
            tokens, offsets = order // self.top_k, self.offsets(ids)
            inner = F.grouped_mm(hidden[tokens], self.up, offs=offsets).relu()
            out = F.grouped_mm(inner, self.down, offs=offsets)
            return self.combine(hidden, tokens, out), offsets

    graph_module, region = captured(SharedSort())
    lower_region(graph_module, region, SITE)
    names = [target_name(node) for node in graph_module.graph.nodes if node.op.startswith("call")]
    assert {"sort", "histc", "cumsum", "experts"} <= set(names)
    assert not {"index_add", "relu", "_grouped_mm", "grouped_mm"} & set(names)


def test_a_region_that_feeds_another_is_lowered_after_it() -> None:
    layers = [GatheredMoE(), GatheredMoE()]
    graph_module = capture(torch.nn.Sequential(*layers), hidden_states())
    regions = [found for found in read_regions(graph_module) if isinstance(found, MoERegion)]
    for place, region in reversed(list(enumerate(regions))):
        register_live(layers[place], region, region_id=f"{SITE}{place}")
        lower_region(graph_module, region, f"{SITE}{place}")
    names = [target_name(node) for node in graph_module.graph.nodes]
    assert (names.count("experts"), names.count("bmm")) == (2, 0)
    graph_module.graph.lint()


@pytest.mark.parametrize("make", [GatheredMoE, GroupedMoE])
def test_the_identity_rewrite_changes_no_bit(make: Callable[[], TinyMoE]) -> None:
    layer = make()
    graph_module, region = captured(layer)
    insert_identity(graph_module, region, "control")
    graph_module.graph.lint()
    assert [node.target for node in graph_module.graph.find_nodes(op="call_module", target="control")] == ["control"]
    hidden = hidden_for(layer, 6)
    assert torch.equal(run(graph_module, layer, hidden), layer(hidden))
