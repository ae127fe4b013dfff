"""Live regions: what the op pair looks up by the string key baked into the compiled graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.bodies import Bodies

__all__ = ["LiveRegion", "lookup", "register"]

_regions: dict[str, LiveRegion] = {}
_lock = threading.Lock()


@dataclass
class LiveRegion:
    """One lowered call site.

    Args:
        site: its key.
        bodies: what its chunks call.
        num_experts, top_k: E, K.
        out_dtype: of the combined output.
        drops_out_of_range: whether assignments with an expert id outside [0, E) are skipped, or an error.
        choose_plan: T -> plan; pure for given T, called once per new T.
    """

    site: str
    bodies: Bodies
    num_experts: int
    top_k: int
    out_dtype: torch.dtype
    drops_out_of_range: bool
    choose_plan: Callable[[int], ChunkPlan]
    plan: ChunkPlan | None = None
    num_tokens: int = 0
    num_chunks: int = 0
    num_steps: int = 0
    _plans: dict[int, ChunkPlan] = field(default_factory=dict)

    def plan_for(self, num_tokens: int) -> ChunkPlan:
        """The plan for T tokens; decided at run time, so that sizes change without recompiling."""
        if num_tokens not in self._plans:
            self._plans[num_tokens] = self.choose_plan(num_tokens)
        return self._plans[num_tokens]

    def use_plan(self, num_tokens: int, plan: ChunkPlan) -> None:
        """Replace the plan for T tokens from the next step on."""
        self._plans[num_tokens] = plan


def register(region: LiveRegion) -> None:
    with _lock:
        _regions[region.site] = region


def lookup(site: str) -> LiveRegion:
    """The region of a key.

    Raises:
        KeyError: the graph was compiled by another process and its region never registered here.
    """
    return _regions[site]
