"""The state of a lowered region or head at step time: plans for each number of tokens, figures of the latest step.

`memfine::head_loss` looks up its live head by the region id in the compiled graph.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from memfine_fx.records import ChunkPlan
from memfine_fx.records.heads import HeadLoss, HeadPlan
from memfine_fx.runtime.head_loop import LossKernel

__all__ = ["MOST_PLANS", "Live", "LiveHead", "Registry", "lookup_head", "register_head", "unregister_head"]

log = logging.getLogger("memfine_fx.plans")

MOST_PLANS = 256
"""The most plans that are stored for one region: a generation has another length at each token."""

LiveT = TypeVar("LiveT", bound="Live[Any]")
PlanT = TypeVar("PlanT", ChunkPlan, HeadPlan)


@dataclass(kw_only=True)
class Live(Generic[PlanT]):
    """One lowered region.

    Args:
        region_id: its key.
        out_dtype: of its result.
        choose_plan: T -> plan; pure for given T and context, called once for each.
        name: its layer or module, as profiles and logs call it; "" for one that stands in for it in a comparison.
        context: what plans depend on beside T now; equal where they are equal.
        plan, num_tokens, num_chunks, num_steps: of the latest step; None and 0 before one.
    """

    region_id: str
    out_dtype: torch.dtype
    choose_plan: Callable[[int], PlanT]
    name: str = ""
    context: Callable[[], object] = lambda: None
    plan: PlanT | None = None
    num_tokens: int = 0
    num_chunks: int = 0
    num_steps: int = 0
    _plans: dict[tuple[int, object], PlanT] = field(default_factory=dict)

    def plan_for(self, num_tokens: int) -> PlanT:
        """The plan for T tokens; decided at run time, so that sizes change without recompiling."""
        key = num_tokens, self.context()
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._choose(num_tokens)
            if self.name:
                log.info("%s, T=%d: %s a chunk; %s", self.name, num_tokens, plan.size_in_words, plan.reason)
        return self._plans[key]

    def forget_plans(self) -> None:
        """Choose again at the next call."""
        self._plans.clear()

    def _choose(self, num_tokens: int) -> PlanT:
        return self.choose_plan(num_tokens)


@dataclass(kw_only=True)
class LiveHead(Live[HeadPlan]):
    """One lowered head.

    Args:
        loss: what is computed of a token's logits.
        kernel: see `runtime.head_loop.run_head`.
    """

    loss: HeadLoss
    kernel: LossKernel | None = None


class Registry(Generic[LiveT]):
    """A table of live counterparts by the region id in a compiled graph; filled while graphs are compiled, by any
    thread.

    It keeps none alive: a counterpart lives with the record of its graph, and so with the model.
    """

    def __init__(self) -> None:
        self._live: weakref.WeakValueDictionary[str, LiveT] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def register(self, live: LiveT) -> None:
        with self._lock:
            self._live[live.region_id] = live

    def unregister(self, region_id: str) -> None:
        with self._lock:
            del self._live[region_id]

    def lookup(self, region_id: str) -> LiveT:
        """The live counterpart of a key.

        Raises:
            KeyError: the graph was compiled by another process and never registered here, or its model is gone.
        """
        return self._live[region_id]


_heads: Registry[LiveHead] = Registry()
register_head, unregister_head, lookup_head = _heads.register, _heads.unregister, _heads.lookup
