"""An accelerator for tests on any machine: the CPU counts as one that has so many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memfine_fx.plan import budget


def give_device(num_bytes: int, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """What a step may use is `num_bytes`, rounded down to 16 KiB; nobody holds anything yet."""
    patch(budget, "is_accelerator", lambda device: True)
    patch(torch.cuda, "mem_get_info", lambda device: (num_bytes + budget._LEAST_RESERVE, 1 << 20))
    for name in ("memory_reserved", "memory_allocated"):
        patch(torch.cuda, name, lambda device: 0)
