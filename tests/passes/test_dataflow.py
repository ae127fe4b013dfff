"""Data flow over values that have no storage to show."""

from __future__ import annotations

import torch
from torch import nn

from memfine_fx.passes.dataflow import Dataflow
from tests.helpers import capture


class MaskedByVmap(nn.Module):
    """As transformers make attention masks: a function of two indices, mapped twice."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        places = torch.arange(4)
        rows = torch.vmap(lambda left: torch.vmap(lambda right: left >= right)(places))
        return scores + rows(places)


def test_values_inside_vmap_are_nodes_like_others() -> None:
    graph_module = capture(MaskedByVmap(), torch.randn(4, 4))
    flow = Dataflow(graph_module.graph)
    (output,) = [node for node in graph_module.graph.nodes if node.op == "output"]
    (scores,) = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    assert output in flow.descendants([scores])
