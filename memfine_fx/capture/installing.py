"""Methods that stand on modules for the time of calls.

A call may be inside another of the same model, and threads call it at once: methods go in with the first call and out
with the last. Where somebody else has set an attribute of that name, theirs stays.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["InstalledMethods"]


class InstalledMethods:
    """Methods for some modules.

    Args:
        methods: (module, name, function); the function becomes a method of the module.
    """

    def __init__(self, methods: Sequence[tuple[torch.nn.Module, str, Callable[..., object]]]) -> None:
        self.methods = [(module, name, types.MethodType(function, module)) for module, name, function in methods]
        self._num_calls = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The methods in their modules' places, for compilations and calls inside."""
        if not self.methods:
            yield
            return
        with self._lock:
            self._num_calls += 1
            if self._num_calls == 1:
                for module, name, method in self.methods:
                    vars(module).setdefault(name, method)
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1
                for module, name, method in () if self._num_calls else self.methods:
                    if vars(module).get(name) is method:
                        del vars(module)[name]
