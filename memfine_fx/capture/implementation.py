"""transformers models whose experts run outside of graphs: switch them to a spelling that reaches one.

The eager loop (`for expert in experts_hit`) breaks the graph at every expert, and the function "memfine" has a loop of
its own, which is chunked already. Models that offer
`set_experts_implementation` compute the same from sorted rows ("grouped_mm") or gathered weights
("batched_mm"); the weights are untouched.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from memfine_fx.compat.tensors import is_quantized
from memfine_fx.compat.transformers import can_switch_experts

__all__ = ["switch_experts", "switched_experts"]

log = logging.getLogger(__name__)
_CAPTURABLE = ("grouped_mm", "batched_mm")
_SWITCHED = ("eager", "memfine")


def switch_experts(model: torch.nn.Module) -> list[str]:
    """Switch every expert loop of `model` that can be switched; one note per switch.

    Only "eager" and "memfine" are replaced; kernels that the user chose stay.
    """
    return [note for module in _switchable(model) if (note := _switch(module))]


@contextlib.contextmanager
def switched_experts(model: torch.nn.Module) -> Iterator[list[str]]:
    """Switch as `switch_experts` does, and back on leaving; gives the notes."""
    before = [(module, module.get_experts_implementation()) for module in _switchable(model)]
    try:
        yield switch_experts(model)
    finally:
        for module, implementation in before:
            if module.get_experts_implementation() != implementation:
                module.set_experts_implementation(implementation)


def _switchable(model: torch.nn.Module) -> Iterator[Any]:
    """The outermost modules that offer the switch."""
    if hasattr(model, "set_experts_implementation") and hasattr(model, "get_experts_implementation"):
        yield model
        return
    for child in model.children():
        yield from _switchable(child)


def _switch(module: Any) -> str | None:
    current = module.get_experts_implementation()
    switched = sorted({implementation for implementation in current.values() if implementation in _SWITCHED})
    if not switched or not can_switch_experts(module):
        return None
    name = type(module).__name__
    kinds = sorted({type(table).__name__ for table in module.parameters() if table.ndim >= 3 and is_quantized(table)})
    if kinds:
        return (
            f"{name}: experts stay in their eager loop, because their tables are {' and '.join(kinds)}, which no other "
            "spelling of experts multiplies by"
        )
    for candidate in _CAPTURABLE:
        wanted = {key: candidate if value in _SWITCHED else value for key, value in current.items()}
        try:
            module.set_experts_implementation(wanted)
        except (ValueError, RuntimeError, ImportError) as refusal:
            log.info("%s does not take experts implementation %s: %s", name, candidate, refusal)
            continue
        if not set(_SWITCHED) & set(module.get_experts_implementation().values()):
            return (
                f"{name}: experts implementation switched from {switched[0]!r} (a loop outside of graphs) to "
                f"{candidate!r}; model.set_experts_implementation({switched[0]!r}) switches back"
            )
    module.set_experts_implementation(current)
    return None
