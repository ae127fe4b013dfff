"""Allocation failures on purpose: before any operation of a chunk, or wherever a chunk has too many rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfine_fx.runtime import halving
from memfine_fx.runtime.halving import Progress
from memfine_fx.runtime.schedule import Chunk

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 MiB (injected)"


class Injector(TorchDispatchMode):
    """Counts the operations inside chunks and fails those that `fails` names, before they compute.

    What is handed over as `out=` is spoiled first: the caller may not count on its old or its new contents.
    """

    def __init__(self, fails: Callable[[int, Chunk], bool]) -> None:
        super().__init__()
        self.num_operations = 0
        self.num_failures = 0
        self.chunk: Chunk | None = None
        self._fails = fails

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert self.chunk is not None
        self.num_operations += 1
        if self._fails(self.num_operations - 1, self.chunk):
            self.num_failures += 1
            if "out" in kwargs:
                torch.ops.aten.fill_.Scalar(kwargs["out"], float("nan"))
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **kwargs)


@contextmanager
def injecting(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int, Chunk], bool]) -> Iterator[Injector]:
    """Fail the n-th operation inside a chunk (n, chunk) wherever `fails` says so."""
    injector = Injector(fails)
    attempt = halving._attempt

    def watched(run: Callable[[Chunk, Progress], None], chunk: Chunk, progress: Progress) -> str | None:
        injector.chunk = chunk
        with injector:  # only here: where such a mode is on, compiled code does not run
            return attempt(run, chunk, progress)

    with monkeypatch.context() as patch:
        patch.setattr(halving, "_attempt", watched)
        yield injector
