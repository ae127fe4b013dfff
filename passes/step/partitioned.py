"""A joint graph split into forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from memfine_fx.memory.liveness import GraphMemory

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """A forward and a backward graph, what each would hold, what was decided, and whether all that pays is kept."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_memory: GraphMemory
    backward_memory: GraphMemory
    decision: str = ""
    keeps_all: bool = False
