"""Which values carry one layer into the next: they are saved where everything else is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from memfine_fx.passes.step.borders import layer_borders

aten = torch.ops.aten
TOKENS, SIDE = 8, 4


class Stack:
    """A graph of layers: x -> sin -> mm, added to x; then the same with experts in the place of mm, or without."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.table, self.ids = self._input("table", (99, SIDE)), self._input("ids", (TOKENS,))
        self.square, self.mask = self._input("square", (SIDE, SIDE)), self._input("mask", (TOKENS, SIDE, SIDE))
        self.num_products = 0

    def _input(self, name: str, shape: Sequence[int]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape)
        return node

    def call(self, target: Any, *args: Any, shape: Sequence[int] = (TOKENS, SIDE), name: str | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = torch.empty(shape)
        return node

    def embedded(self) -> fx.Node:
        return self.call(aten.embedding.default, self.table, self.ids)

    def attended(self, x: fx.Node, name: str) -> fx.Node:
        """Beside the stream goes a mask that all layers read."""
        masked = self.call(aten.mul.Tensor, self.call(aten.sin.default, x), self.mask)
        self.num_products += 1
        product = self.call(aten.mm.default, masked, self.square, name=f"product_{self.num_products}")
        return self.call(aten.add.Tensor, x, product, name=name)

    def routed(self, x: fx.Node, name: str, *, has_shared: bool = True) -> fx.Node:
        normed = self.call(aten.sin.default, x)
        found = self.call(torch.ops.memfine.experts.default, normed, self.call(aten.tanh.default, normed))
        if has_shared:
            found = self.call(aten.add.Tensor, found, self.call(aten.mm.default, normed, self.square))
        return self.call(aten.add.Tensor, x, found, name=name)

    def head(self, x: fx.Node, *beside: fx.Node) -> fx.Graph:
        logits = self.call(aten.mm.default, self.call(aten.cos.default, x), self.table, shape=(TOKENS, 99), name="head")
        self.graph.output([logits, *beside])
        return self.graph

    def borders(self) -> list[str]:
        products = [node.name for node in self.graph.nodes if node.target is aten.mm.default]
        return [node.name for node in layer_borders(self.graph, products)]


@pytest.mark.parametrize("has_shared", [True, False])
def test_what_stands_behind_each_layers_experts_is_a_border(has_shared: bool) -> None:
    stack = Stack()
    x = stack.embedded()
    for layer in range(3):
        x = stack.routed(stack.attended(x, f"half_{layer}"), f"whole_{layer}", has_shared=has_shared)
    stack.head(x)
    assert stack.borders() == ["whole_0", "whole_1", "whole_2"]


def test_layers_without_experts_have_one_border_each() -> None:
    stack = Stack()
    x = stack.embedded()
    for layer in range(2):
        x = stack.attended(stack.attended(x, f"half_{layer}"), f"dense_{layer}")
    x = stack.routed(stack.attended(x, "half_2"), "whole_2")
    stack.head(x)
    assert stack.borders() == ["dense_0", "dense_1", "whole_2"]


def test_a_result_that_leaves_a_layer_sideways_is_no_way_around_a_border() -> None:
    """A router's logits, which a loss of their own reads."""
    stack = Stack()
    x = stack.embedded()
    sideways = []
    for layer in range(2):
        half = stack.attended(x, f"half_{layer}")
        sideways.append(stack.call(aten.tanh.default, stack.call(aten.sin.default, half)))
        x = stack.routed(half, f"whole_{layer}")
    stack.head(x, *sideways)
    assert stack.borders() == ["whole_0", "whole_1"]


def test_two_streams_have_no_border() -> None:
    stack = Stack()
    x = stack.embedded()
    other = stack.call(aten.cos.default, x, name="other")
    for layer in range(2):
        x = stack.routed(stack.attended(x, f"half_{layer}"), f"whole_{layer}")
        other = stack.call(aten.mul.Tensor, other, x)
    stack.head(stack.call(aten.add.Tensor, x, other, name="joined"))
    assert stack.borders() == ["joined"]


def test_a_graph_that_ends_at_its_experts_has_the_borders_before_them() -> None:
    stack = Stack()
    x = stack.embedded()
    for layer in range(2):
        x = stack.routed(stack.attended(x, f"half_{layer}"), f"whole_{layer}", has_shared=False)
    stack.graph.output([x])
    assert stack.borders() == ["whole_0"]


def test_a_graph_without_experts_has_none() -> None:
    stack = Stack()
    stack.head(stack.attended(stack.embedded(), "half"))
    assert stack.borders() == []
