"""Tables that are kept quantized, captured so that nothing keeps them whole.

bitsandbytes caches what it makes of a table in 4 bits until the module's forward ends, for modules that read it more
than once. In a graph that would be an output: the whole table, alive from its layer to the end of forward. For the time
of a compiled call its two hooks do nothing.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from memfine_fx.capture.installing import InstalledForCalls
from memfine_fx.compat.bitsandbytes import caching_hooks

__all__ = ["UncachedTables"]


class UncachedTables(InstalledForCalls):
    """The caching hooks of a model, without which calls run.

    Args:
        model: searched once; `structure.FoundAgain` searches again when tables were made quantized.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._hooks = caching_hooks(model)
        self._taken: list[tuple[MutableMapping[int, Any], int, Any]] = []

    def _put_in(self) -> None:
        for hooks, key in self._hooks:
            if key in hooks:
                self._taken.append((hooks, key, hooks[key]))
                hooks[key] = _nothing

    def _take_out(self) -> None:
        for hooks, key, hook in self._taken:
            if hooks.get(key) is _nothing:
                hooks[key] = hook
        self._taken.clear()


def _nothing(*args: object, **kwargs: object) -> None:
    """A hook in the place of another."""
