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
        saves_all: whether all that pays is saved.
        is_least: whether it is the one for budgets that no other fits: nothing smaller can be made.
        base: the partition of `passes.step.fit` that it is or was made from: "save_all", "recompute_pointwise" or
            "recompute_all"; "" without a budget.
        optional: regions that save rows where a run has room for them: region id -> seconds spared per byte.
        fusible_gradients: see `GraphStep`.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_memory: GraphMemory
    backward_memory: GraphMemory
    decision: str = ""
    saves_all: bool = False
    is_least: bool = False
    base: str = ""
    optional: Mapping[str, float] = field(default_factory=dict)
    fusible_gradients: Mapping[tuple[str, int], int] = field(default_factory=dict)
