"""A joint graph split into forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from memfine_fx.memory.liveness import GraphMemory

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """A joint graph in two.

    Args:
        forward, backward: the graphs.
        forward_memory, backward_memory: what each would hold.
        decision: what was decided, in words.
        keeps_all: whether all that pays is kept.
        is_least: whether it is the one for budgets that no other fits: nothing smaller can be made.
        base: "full", "spare" or "lean" (`passes.step.fit`), which it is or was made from; "" without a budget.
        optional: what may be kept where a run has room for it: region id -> seconds spared per byte.
        sole: see `GraphStep`.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_memory: GraphMemory
    backward_memory: GraphMemory
    decision: str = ""
    keeps_all: bool = False
    is_least: bool = False
    base: str = ""
    optional: Mapping[str, float] = field(default_factory=dict)
    sole: Mapping[tuple[str, int], int] = field(default_factory=dict)
