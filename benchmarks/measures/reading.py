"""Does one reader see what the two stages before it saw, and at what cost?

Every spelling of the coverage page is captured once. `passes.find` and `passes.raising` are what the pipeline asks;
`passes.read` is to take their place. Seconds are of reading alone, medians of `rounds`, alternating.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import fx

from benchmarks.coverage.spellings import SPELLINGS
from benchmarks.measures import Answer
from memfine_fx.capture.flags import SETTINGS, flags_set
from memfine_fx.capture.source import RewrittenLoops
from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dispatch_masks import conceal, expose
from memfine_fx.passes.find import find_candidates
from memfine_fx.passes.raising import raise_region
from memfine_fx.passes.read.dropped import drop_unread_ids
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.records import Candidate, MoERegion

__all__ = ["captured_spelling", "measure", "regions_of_one_reader", "regions_of_two_stages"]


def captured_spelling(name: str) -> fx.GraphModule:
    """The graph of one spelling that holds its experts, sizes symbolic."""
    torch._dynamo.reset()
    layer, hidden = SPELLINGS[name]()
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, example_inputs: object) -> fx.GraphModule:
        graphs.append(graph_module)
        return graph_module

    with flags_set(SETTINGS[0]), RewrittenLoops(layer).installed():
        torch.compile(layer, backend=keep, dynamic=True)(hidden)
    return max(graphs, key=lambda graph_module: len(graph_module.graph.nodes))


def regions_of_one_reader(graph_module: fx.GraphModule) -> list[MoERegion]:
    found = [one for one in read_regions(graph_module) if isinstance(one, MoERegion)]
    drop_unread_ids(graph_module)
    return found


def regions_of_two_stages(graph_module: fx.GraphModule) -> list[MoERegion]:
    exposed = expose(graph_module)
    found = []
    for candidate in find_candidates(graph_module):
        try:
            found += [raise_region(candidate)] if isinstance(candidate, Candidate) else []
        except CannotChunk:
            continue
    conceal(graph_module, exposed)
    return found


def measure(rounds: int = 3) -> Answer:
    lines, ratios, num_alike = [], [], 0
    totals = [0.0, 0.0]
    for name in SPELLINGS:
        graph_module = captured_spelling(name)
        pairs = [
            (_timed(regions_of_two_stages, graph_module), _timed(regions_of_one_reader, graph_module))
            for _ in range(rounds)
        ]
        (_, before), (_, after) = pairs[0]
        seconds = [statistics.median(pair[place][0] for pair in pairs) for place in (0, 1)]
        totals = [total + one for total, one in zip(totals, seconds, strict=True)]
        ratios.append(seconds[1] / seconds[0])
        num_alike += len(before) == len(after)
        lines.append(f"{name}: {len(before)} and {len(after)} regions, {seconds[0]:.3f} and {seconds[1]:.3f} s")
    row = {
        "spellings": len(SPELLINGS),
        "alike": num_alike,
        "seconds_of_two_stages": round(totals[0], 3),
        "seconds_of_one_reader": round(totals[1], 3),
        "median_ratio": round(statistics.median(ratios), 3),
    }
    return Answer(lines, row, is_met=num_alike == len(SPELLINGS) and totals[1] <= totals[0])


def _timed(
    read: Callable[[fx.GraphModule], list[MoERegion]], graph_module: fx.GraphModule
) -> tuple[float, list[MoERegion]]:
    began = time.perf_counter()
    found = read(graph_module)
    return time.perf_counter() - began, found
