"""Live heads: what `memfine::head_loss` looks up by the string key baked into the compiled graph."""

from __future__ import annotations

from dataclasses import dataclass

from memfine_fx.records.heads import HeadLoss, HeadPlan
from memfine_fx.runtime.head_loop import LossKernel
from memfine_fx.runtime.live import Live
from memfine_fx.runtime.registry import Registry

__all__ = ["LiveHead", "lookup_head", "register_head", "unregister_head"]


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
