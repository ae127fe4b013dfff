"""Live heads: what `memfine::head_loss` looks up by the string key baked into the compiled graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memfine_fx.records.heads import HeadLoss, HeadPlan
from memfine_fx.runtime.registry import Registry
from memfine_fx.runtime.store import MOST_PLANS

__all__ = ["LiveHead", "lookup_head", "register_head", "unregister_head"]

log = logging.getLogger("memfine_fx.plans")


@dataclass
class LiveHead:
    """One lowered head.

    Args:
        site: its key.
        loss: what is computed.
        out_dtype: of the loss.
        choose_plan: T -> plan; pure for given T and context, called once for each.
        name: its module, as profiles and logs call it.
        context: what plans depend on beside T now; equal where they are equal.
        plan, num_tokens, num_chunks, num_steps: of the latest step; None and 0 before one.
    """

    site: str
    loss: HeadLoss
    out_dtype: torch.dtype
    choose_plan: Callable[[int], HeadPlan]
    name: str = ""
    context: Callable[[], object] = lambda: None
    plan: HeadPlan | None = None
    num_tokens: int = 0
    num_chunks: int = 0
    num_steps: int = 0
    _plans: dict[tuple[int, object], HeadPlan] = field(default_factory=dict)

    def plan_for(self, num_tokens: int) -> HeadPlan:
        """The plan for T tokens; decided at run time, so that sizes change without recompiling."""
        key = num_tokens, self.context()
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self.choose_plan(num_tokens)
            log.info("%s, T=%d: %d tokens a chunk; %s", self.name, num_tokens, plan.tokens_per_chunk, plan.reason)
        return self._plans[key]

    def forget_plans(self) -> None:
        """Choose again at the next call."""
        self._plans.clear()


_heads: Registry[LiveHead] = Registry()
register_head, unregister_head, lookup_head = _heads.register, _heads.unregister, _heads.lookup
