"""A joint graph split into forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from memfine_fx.memory.liveness import GraphMemory

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """A forward and a backward graph, what each would hold, what was decided, whether all that pays is kept, and what
    may be kept where a run has room for it (site -> seconds spared per byte)."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_memory: GraphMemory
    backward_memory: GraphMemory
    decision: str = ""
    keeps_all: bool = False
    optional: Mapping[str, float] = field(default_factory=dict)
