"""The state of a lowered region or head at step time: plans for each number of tokens, figures of the latest step.

`memfine::head_loss` looks up its live head by the region id in the compiled graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from memfine_fx.records import ChunkPlan
from memfine_fx.records.heads import HeadLoss, HeadPlan
from memfine_fx.runtime.head_loop import LossKernel
from memfine_fx.runtime.registry import Registry

__all__ = ["MOST_PLANS", "Live", "LiveHead", "lookup_head", "register_head", "unregister_head"]

log = logging.getLogger("memfine_fx.plans")

MOST_PLANS = 256
"""The most plans that are stored for one region: a generation has another length at each token."""

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


_heads: Registry[LiveHead] = Registry()
register_head, unregister_head, lookup_head = _heads.register, _heads.unregister, _heads.lookup
