"""Live heads: what `memfine::head_loss` looks up by the string key baked into the compiled graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memfine_fx.head_records import HeadLoss, HeadPlan
from memfine_fx.runtime.registry import Registry

__all__ = ["LiveHead", "lookup_head", "register_head", "unregister_head"]

log = logging.getLogger("memfine_fx.plans")


@dataclass
class LiveHead:
    """One lowered head.

    Args:
        site: its key.
        loss: what is computed.
        out_dtype: of the loss.
        choose_plan: T -> plan; pure for given T, called once per new T.
        name: its module, as profiles and logs call it.
        plan, num_tokens, num_chunks, num_steps: of the latest step; None and 0 before one.
    """

    site: str
    loss: HeadLoss
    out_dtype: torch.dtype
    choose_plan: Callable[[int], HeadPlan]
    name: str = ""
    plan: HeadPlan | None = None
    num_tokens: int = 0
    num_chunks: int = 0
    num_steps: int = 0
    _plans: dict[int, HeadPlan] = field(default_factory=dict)

    def plan_for(self, num_tokens: int) -> HeadPlan:
        """The plan for T tokens; decided at run time, so that sizes change without recompiling."""
        if num_tokens not in self._plans:
            plan = self._plans[num_tokens] = self.choose_plan(num_tokens)
            log.info("%s, T=%d: %d tokens a chunk; %s", self.name, num_tokens, plan.tokens_per_chunk, plan.reason)
        return self._plans[num_tokens]

    def forget_plans(self) -> None:
        """Choose again at the next call."""
        self._plans.clear()


_heads: Registry[LiveHead] = Registry()
register_head, unregister_head, lookup_head = _heads.register, _heads.unregister, _heads.lookup
