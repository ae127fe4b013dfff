"""Equal layers are read once, and a layer that differs in anything that counts is read by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from benchmarks.coverage.spellings import SPELLINGS
from memfine_fx.passes.read import regions
from memfine_fx.passes.read.reader import Reader
from memfine_fx.records import MoERegion, Refusal
from tests.helpers import HIDDEN, GatheredMoE, capture, code_of, hidden_states


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def read(graph_module: fx.GraphModule, *, is_shared: bool = True) -> tuple[list[MoERegion | Refusal], int]:
    """The regions, and how many walks it took."""
    walks: list[Reader] = []
    made = Reader.__init__

    def noted(self: Reader, *args: Any, **kwargs: Any) -> None:
        walks.append(self)
        made(self, *args, **kwargs)

    with mock.patch.object(Reader, "__init__", noted):
        if is_shared:
            return regions.read_regions(graph_module), len(walks)
        with mock.patch.object(regions, "repeated", return_value=None):
            return regions.read_regions(graph_module), len(walks)


def fields_of(region: MoERegion | Refusal) -> dict[str, object]:
    fields = {one.name: getattr(region, one.name) for one in dataclasses.fields(region)}
    if isinstance(region, MoERegion):
        function = fields.pop("expert_fn")
        fields |= {"code": code_of(function.graph_module), "kinds": function.param_kinds, "weighs": function.has_weight}
    return fields


def three_of(name: str) -> tuple[nn.Module, Tensor]:
    layers = [SPELLINGS[name]() for _ in range(3)]
    return Layers(*(layer for layer, _ in layers)), layers[0][1]


@pytest.mark.parametrize(
    "name", ["gathered weights, SwiGLU", "expert loop over a ModuleList", "gathered weights by einsum",
             "every expert on every token, one_hot", "scores on the input, bmm over all experts"],
)  # fmt: skip
def test_a_region_that_was_moved_is_the_one_that_would_be_read(name: str) -> None:
    model, hidden = three_of(name)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph_module = capture(model, hidden)
    once, few = read(graph_module)
    each, many = read(graph_module, is_shared=False)
    assert list(map(fields_of, once)) == list(map(fields_of, each))
    assert sum(isinstance(one, MoERegion) for one in once) == 3
    assert few * 3 == many * 2  # the first layer's tokens are an argument, the others' are computed


class SharedExpert(GatheredMoE):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(hidden, *self.route(hidden)) + hidden.relu()


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "a shared expert behind it": lambda: Layers(GatheredMoE(), SharedExpert()),
    "another top-k": lambda: Layers(GatheredMoE(top_k=2), GatheredMoE(top_k=3)),
    "another activation": lambda: Layers(GatheredMoE(), GatheredMoE(torch.square)),
    "a frozen table": lambda: Layers(GatheredMoE(), _frozen(GatheredMoE())),
}


def _frozen(layer: GatheredMoE) -> GatheredMoE:
    layer.up.requires_grad_(False)
    return layer


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_layer_that_differs_is_read_by_itself(name: str) -> None:
    graph_module = capture(DIFFERENT[name](), hidden_states())
    once, walks = read(graph_module)
    each, all_walks = read(graph_module, is_shared=False)
    assert list(map(fields_of, once)) == list(map(fields_of, each))
    assert walks == all_walks


def test_what_lies_around_a_repeated_layer_is_asked_again() -> None:
    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GatheredMoE(), GatheredMoE()

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = self.first(hidden)
            index, weight = self.second.route(hidden)
            out = self.second.experts(hidden, index, weight)
            return out + self.rows[0].sum() if hasattr(self, "rows") else out + out.sum()

    graph_module = capture(Leaks(), torch.randn(13, HIDDEN))
    (first, second) = read(graph_module)[0]
    assert isinstance(first, MoERegion) and isinstance(second, MoERegion)
    routed = next(node for node in second.cut.nodes if node is not second.cut.exit and node.name.startswith("bmm"))
    with graph_module.graph.inserting_after(second.cut.exit):
        leaked = graph_module.graph.call_function(torch.sum, (routed,))
    leaked.meta["example_value"] = routed.meta["example_value"].sum()
    outcomes = read(graph_module)[0]
    assert isinstance(outcomes[0], MoERegion) and isinstance(outcomes[1], Refusal)
