"""Tables that are kept quantized, captured so that nothing keeps them whole.

bitsandbytes caches what it makes of a table in 4 bits until the module's forward ends, for modules that read it more
than once. In a graph that would be an output: the whole table, alive from its layer to the end of forward. For the time
of a compiled call its two hooks do nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from memfine_fx.compat.bitsandbytes import caching_hooks

__all__ = ["UncachedTables"]


class UncachedTables:
    """The caching hooks of a model.

    Args:
        model: searched at the first of calls that are under way at once.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._num_calls = 0
        self._lock = threading.Lock()
        self._taken: list[tuple[object, ...]] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Without caches, for compilations and calls inside."""
        with self._lock:
            self._num_calls += 1
            if self._num_calls == 1:
                self._replace()
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1
                if not self._num_calls:
                    self._put_back()

    def _replace(self) -> None:
        for hooks, key in caching_hooks(self._model):
            self._taken.append((hooks, key, hooks[key]))
            hooks[key] = _nothing

    def _put_back(self) -> None:
        for hooks, key, hook in self._taken:
            if hooks.get(key) is _nothing:  # type: ignore[attr-defined]  # else somebody removed it since
                hooks[key] = hook  # type: ignore[index]
        self._taken.clear()


def _nothing(*args: object, **kwargs: object) -> None:
    """A hook in the place of another."""
