"""Regions of the tests' layers, read by `passes.read`."""

from __future__ import annotations

import pytest
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.records import MoERegion, Refusal
from tests.helpers import TinyMoE, capture, hidden_for


def only_region(graph_module: fx.GraphModule) -> MoERegion:
    """The one region of a graph.

    Raises:
        CannotChunk: it is refused.
    """
    (found,) = read_regions(graph_module)
    if isinstance(found, Refusal):
        raise CannotChunk(found.reason, found.node)
    return found


def refusals_of(graph_module: fx.GraphModule) -> list[Refusal]:
    return [found for found in read_regions(graph_module) if isinstance(found, Refusal)]


def raised(layer: TinyMoE, *, num_tokens: int = 13, dynamic: bool = True) -> MoERegion:
    return only_region(capture(layer, hidden_for(layer, num_tokens), dynamic=dynamic))


def refusal_reason(layer: TinyMoE) -> str:
    """The reason why a layer's only region is refused; its graph must stay as it was."""
    graph_module = capture(layer, hidden_for(layer))
    before = graph_module.code, str(graph_module.graph)
    with pytest.raises(CannotChunk) as caught:
        only_region(graph_module)
    assert (graph_module.code, str(graph_module.graph)) == before
    return caught.value.reason
