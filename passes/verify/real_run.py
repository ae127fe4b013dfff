"""Record what regions read and give in one real run of a captured graph.

Before:  exit = combine(...)
After:   exit = combine(...);  record(region number, region inputs, exit)      (while the graph runs once)

The recording nodes are taken out again: the graph is left as it was. Bodies of higher-order ops run inside the whole
graph, so regions of checkpointed layers are recorded too. Nothing the run writes survives: tensors that are not
parameters are copied first, and the random state is put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfine_fx.records import Cut

__all__ = ["Recorded", "record_regions"]


@dataclass(frozen=True)
class Recorded:
    """One region's values.

    Args:
        values: one per input of its cut, detached.
        output: its exit.
    """

    values: tuple[Any, ...]
    output: torch.Tensor


def record_regions(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], cuts: Sequence[tuple[fx.GraphModule, Cut]]
) -> list[Recorded | None]:
    """Run the graph once and record the regions.

    Args:
        graph_module: the captured graph.
        example_inputs: real tensors, and symbols whose hints are the sizes of this call.
        cuts: (the graph or body that holds it, the cut).

    Returns:
        One per cut; None where the run did not pass it.
    """
    recorded: list[Recorded | None] = [None] * len(cuts)

    def record(number: int, values: tuple[Any, ...], output: torch.Tensor) -> None:
        recorded[number] = Recorded(tuple(map(_snapshot, values)), output.detach().clone())

    bodies = list(dict.fromkeys(body for body, _ in cuts))
    inserted: list[fx.Node] = []
    try:
        for number, (body, cut) in enumerate(cuts):
            with body.graph.inserting_after(cut.exit):
                inserted.append(body.graph.call_function(record, (number, tuple(cut.inputs), cut.exit)))
        for body in bodies:
            body.recompile()
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng():
            graph_module(*map(_copied, example_inputs))
    finally:
        for node in inserted:
            node.graph.erase_node(node)
        for body in bodies:
            body.recompile()
    return recorded


def _snapshot(value: Any) -> Any:
    """Parameters change only between steps; everything else may be written right after."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if isinstance(value, torch.nn.Parameter) else value.detach().clone()


def _copied(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value.node.hint
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.detach().clone()
    return value
