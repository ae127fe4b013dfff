"""What stands between a table that ranks share and the experts that read it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from memfine_fx.passes.lower.sharded import _same_experts

E = 3


@pytest.mark.parametrize(
    ("make", "is_followed"),
    [
        (lambda table: table.reshape(E, -1), True),
        (lambda table: table.reshape(-1, 1).reshape(E, 2, 8), True),
        (lambda table: table.reshape(2 * E, 8), False),
        (lambda table: table.view(torch.uint8), False),
        (lambda table: table.reshape(-1, 1).view(torch.uint8).reshape(E, -1), False),
    ],
    ids=["flat", "flat and back", "halves", "bytes", "bytes between"],
)
def test_reshapes_that_keep_each_experts_numbers_are_followed(make: object, is_followed: bool) -> None:
    graph = fx.symbolic_trace(make).graph  # type: ignore[arg-type]  # a function of a tensor
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["example_value"] = torch.zeros(E, 4, 4)
        elif node.op == "call_method":
            source = node.args[0].meta["example_value"]
            node.meta["example_value"] = getattr(source, node.target)(*node.args[1:])
    placeholder, *_ = graph.nodes
    assert (_same_experts(graph.output_node().args[0]) is placeholder) == is_followed  # type: ignore[arg-type]  # a node
