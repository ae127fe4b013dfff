"""A joint graph split into forward and backward, and how elementwise work is told to be computed again in it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from memfine_fx.memory.liveness import GraphMemory

__all__ = ["RECOMPUTES_ELEMENTWISE", "Partition"]

RECOMPUTES_ELEMENTWISE = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
    "ban_recompute_not_in_allowlist": False,
}
"""Settings of functorch's partitioner with which elementwise work is computed again wherever that saves bytes."""


@dataclass(frozen=True)
class Partition:
    """A forward and a backward graph, what each would hold, what was decided, and whether all that pays is kept."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_memory: GraphMemory
    backward_memory: GraphMemory
    decision: str = ""
    keeps_all: bool = False
