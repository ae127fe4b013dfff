"""Parameters of the expert function as the op pair carries them: a flat list, E entries for the "each" kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from memfine_fx.records import ParamKind

__all__ = ["group_params"]

ItemT = TypeVar("ItemT")


def group_params(flat: Sequence[ItemT], kinds: Sequence[ParamKind], num_experts: int) -> list[tuple[ItemT, ...]]:
    """One group per parameter: E items for the "each" kind, one for the others.

    Args:
        flat: what belongs to the parameters (tensors, nodes, flags), in order.
        kinds: kind of each parameter.
        num_experts: E.
    """
    items = iter(flat)
    groups = [tuple(next(items) for _ in range(num_experts if kind == "each" else 1)) for kind in kinds]
    assert next(items, None) is None, "more items than parameters"
    return groups
