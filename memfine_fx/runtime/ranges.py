"""Profiler ranges of a region's run: its layer and pass, and each chunk with its rows.

Only while a profiler is on; otherwise the chunks are walked as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch.autograd.profiler import record_function

from memfine_fx.compat.autograd import is_profiling
from memfine_fx.runtime.schedule import Chunk

__all__ = ["range_of", "ranged"]


class _RangedChunks(list[Chunk]):
    """Chunks that open a range when they come up and close it when the next does."""

    def __init__(self, chunks: Sequence[Chunk], name: str) -> None:
        super().__init__(chunks)
        self._name = name

    def __iter__(self) -> Iterator[Chunk]:
        for number, chunk in enumerate(super().__iter__(), start=1):
            with record_function(f"{self._name} chunk {number}/{len(self)}, {chunk.num_rows} rows"):
                yield chunk


def range_of(name: str) -> contextlib.AbstractContextManager[object]:
    """The range of a region's forward or backward."""
    return record_function(name) if is_profiling() else contextlib.nullcontext()


def ranged(chunks: list[Chunk], name: str) -> list[Chunk]:
    """The chunks, each in a range of its own when it is walked."""
    return _RangedChunks(chunks, name) if is_profiling() else chunks
