"""Every spelling of the coverage page, read once: the same experts as the reader that the pipeline asks."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from benchmarks.coverage.spellings import SPELLINGS
from memfine_fx.capture.flags import SETTINGS, flags_set
from memfine_fx.capture.source import RewrittenLoops
from memfine_fx.passes.dispatch_masks import conceal, expose
from memfine_fx.passes.find import find_candidates
from memfine_fx.passes.raising import raise_region
from memfine_fx.passes.read.dropped import drop_unread_ids
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.records import Candidate, MoERegion

FAST = ("gathered weights, SwiGLU", "expert loop, one_hot", "list of experts, capacity", "slots, padded")


def graph_of(name: str) -> fx.GraphModule:
    layer, hidden = SPELLINGS[name]()
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, example_inputs: object) -> fx.GraphModule:
        graphs.append(graph_module)
        return graph_module

    with flags_set(SETTINGS[0]), RewrittenLoops(layer).installed():
        torch.compile(layer, backend=keep, dynamic=True)(hidden)
    return max(graphs, key=lambda graph_module: len(graph_module.graph.nodes))


def experts_of(region: MoERegion) -> tuple[object, ...]:
    dims = region.dims
    kinds = sorted(region.expert_fn.param_kinds)
    return dims.hidden, dims.num_experts, dims.top_k, kinds, len(region.params), str(region.base), region.slots


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SPELLINGS]
)
def test_both_readers_see_the_same_experts(name: str) -> None:
    graph_module = graph_of(name)
    before = str(graph_module.graph)
    read = [one for one in read_regions(graph_module) if isinstance(one, MoERegion)]
    exposed = expose(graph_module)
    raised = [raise_region(one) for one in find_candidates(graph_module) if isinstance(one, Candidate)]
    assert read and list(map(experts_of, read)) == list(map(experts_of, raised))
    conceal(graph_module, exposed)
    drop_unread_ids(graph_module)
    assert str(graph_module.graph) == before
