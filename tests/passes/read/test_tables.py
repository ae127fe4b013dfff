"""Tables whose experts are not in front: two views put them there, and are gone where the region is not lowered."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, fx

from memfine_fx.passes.read import regions
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.passes.read.tables import restore_tables
from memfine_fx.records import MoERegion
from tests.helpers import capture

E, K, H, WIDTH, R = 8, 2, 16, 24, 2


class Packed(torch.nn.Module):
    """Experts last in `b`, one behind the other in `flat`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(H, E)
        self.base = torch.nn.Parameter(torch.randn(E, WIDTH, H), requires_grad=False)
        self.a, self.b = torch.nn.Parameter(torch.randn(E, R, H)), torch.nn.Parameter(torch.randn(WIDTH, R, E))

    def forward(self, hidden: Tensor) -> Tensor:
        weight, index = self.gate(hidden).softmax(-1).topk(K)
        table = self.base + torch.einsum("ore,eri->eoi", self.b, self.a)
        inner = torch.einsum("th,tkfh->tkf", hidden, table[index])
        return torch.einsum("tkf,tk->tf", inner, weight)


@pytest.fixture
def graph() -> fx.GraphModule:
    return capture(Packed(), torch.randn(9, H))


def test_the_table_of_a_region_has_experts_in_front_and_is_trained(graph: fx.GraphModule) -> None:
    (region,) = read_regions(graph)
    assert isinstance(region, MoERegion) and region.makes_tables and not region.expert_dims
    moved = [node for node in region.params if node.target is torch.movedim]
    assert [tuple(node.meta["example_value"].shape) for node in moved] == [(E, WIDTH, R)]
    assert moved[0].meta["example_value"].requires_grad
    assert moved[0] in region.cut.inputs
    graph.graph.lint()


class Stacked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Packed() for _ in range(3))
        self.back = torch.nn.Linear(WIDTH, H)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + self.back(layer(hidden))
        return hidden


def test_tables_of_equal_layers_are_moved_too() -> None:
    graph = capture(Stacked(), torch.randn(9, H))
    with mock.patch.object(regions, "_reading", wraps=regions._reading) as reading:
        found = read_regions(graph)
    assert all(isinstance(one, MoERegion) and torch.movedim in [param.target for param in one.params] for one in found)
    assert reading.call_count == 2  # the first layer's tokens are an argument, the others' are computed
    graph.graph.lint()


def test_nothing_of_it_is_left_where_the_region_stays(graph: fx.GraphModule) -> None:
    before = str(graph.graph)
    read_regions(graph)
    assert str(graph.graph) != before
    restore_tables(graph)
    assert str(graph.graph) == before
