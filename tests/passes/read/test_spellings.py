"""Every spelling of the coverage page, read once: the same experts as the two stages that the pipeline asks."""

from __future__ import annotations

import pytest

from benchmarks.coverage.spellings import SPELLINGS
from benchmarks.measures.reading import captured_spelling, regions_of_one_reader, regions_of_two_stages
from memfine_fx.records import MoERegion

FAST = ("gathered weights, SwiGLU", "expert loop, one_hot", "list of experts, capacity", "slots, padded")


def experts_of(region: MoERegion) -> tuple[object, ...]:
    dims = region.dims
    kinds = sorted(region.expert_fn.param_kinds)
    return dims.hidden, dims.num_experts, dims.top_k, kinds, len(region.params), str(region.base), region.slots


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SPELLINGS]
)
def test_both_readers_see_the_same_experts(name: str) -> None:
    graph_module = captured_spelling(name)
    before = str(graph_module.graph)
    read, raised = regions_of_one_reader(graph_module), regions_of_two_stages(graph_module)
    assert read and list(map(experts_of, read)) == list(map(experts_of, raised))
    assert str(graph_module.graph) == before
