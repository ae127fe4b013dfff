"""Puts methods and hooks into a model for the time of calls, and takes them out again.

A call may be inside another of the same model, and threads call it at once: things go in with the first call and out
with the last. Where somebody else has set something in their place, theirs stays.
"""

from __future__ import annotations

import abc
import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["InstalledForCalls", "InstalledMethods", "uninstalled"]


class _InThread(threading.local):
    """Everything that is installed for calls of this thread, in the order of the calls."""

    def __init__(self) -> None:
        self.installed: list[InstalledForCalls] = []


_in_thread = _InThread()


class InstalledForCalls(abc.ABC):
    """Something that is in its place while calls are under way."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In its place, for compilations and calls inside."""
        with self._lock:
            self._num_calls += 1
            if self._num_calls == 1:
                self._put_in()
        _in_thread.installed.append(self)
        try:
            yield
        finally:
            _in_thread.installed.remove(self)
            with self._lock:
                self._num_calls -= 1
                if not self._num_calls:
                    self._take_out()

    @contextlib.contextmanager
    def _uninstalled(self) -> Iterator[None]:
        """Taken out for the time inside, although calls are under way."""
        with self._lock:
            self._take_out()
        try:
            yield
        finally:
            with self._lock:
                if self._num_calls:
                    self._put_in()

    @abc.abstractmethod
    def _put_in(self) -> None: ...

    @abc.abstractmethod
    def _take_out(self) -> None: ...


class InstalledMethods(InstalledForCalls):
    """Methods for some modules.

    Args:
        methods: (module, name, function); the function becomes a method of the module.
    """

    def __init__(self, methods: Sequence[tuple[torch.nn.Module, str, Callable[..., object]]]) -> None:
        super().__init__()
        self.methods = [(module, name, types.MethodType(function, module)) for module, name, function in methods]

    def _put_in(self) -> None:
        for module, name, method in self.methods:
            vars(module).setdefault(name, method)

    def _take_out(self) -> None:
        for module, name, method in self.methods:
            if vars(module).get(name) is method:
                del vars(module)[name]


@contextlib.contextmanager
def uninstalled() -> Iterator[None]:
    """Take everything out that is installed for calls of this thread: models run as their authors wrote them."""
    with contextlib.ExitStack() as stack:
        for installed in reversed(dict.fromkeys(_in_thread.installed)):
            stack.enter_context(installed._uninstalled())
        yield
