"""Regions and heads run on tensors that hold nothing: their launch code, not what their operators say of shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfine_fx.kernels.experts import route_on_device
from memfine_fx.runtime import head, op

__all__ = ["Regions"]

_OPERATORS = {
    "route_on_device": route_on_device, "experts": op.experts, "experts_saving": op.experts_saving,
    "experts_backward": op.experts_backward, "experts_backward_saved": op.experts_backward_saved,
    "num_saved_rows": op.num_saved_rows, "head_loss": head.head_loss,
}  # fmt: skip
_RUN = {getattr(torch.ops.memfine, name).default: operator._init_fn for name, operator in _OPERATORS.items()}
_SITE = {"experts": 5, "experts_saving": 5, "experts_backward": 6, "experts_backward_saved": 6}


class Regions(TorchDispatchMode):
    """Runs the operators' implementations, which a fake mode would pass over; notes the region ids of regions."""

    def __init__(self) -> None:
        super().__init__()
        self.region_ids: dict[str, None] = {}

    supports_higher_order_operators = True  # the random state of what is recomputed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs under this mode; its compilation does not."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _RUN:
            return func(*args, **(kwargs or {}))
        place = _SITE.get(func._schema.name.removeprefix("memfine::"))
        if place is not None:
            self.region_ids[args[place]] = None
        return _RUN[func](*args, **(kwargs or {}))
