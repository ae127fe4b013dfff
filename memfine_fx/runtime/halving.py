"""Walking chunks so that an allocation failure costs a retry in halves, and changes no result.

Terms
    effect    one in-place write of a chunk into what outlives it: the output, a gradient, a staged sum. The
              effects of a chunk come in a fixed order, and each raises before it wrote anything or is complete
              (a write that sets, rather than adds, may also be cut short: it is done again)
    progress  how many effects of a chunk have happened

1. A chunk computes into memory of its own, then its effects happen one by one.
2. When an allocation fails, everything the chunk had made is dropped and the chunk is walked again in parts of at
   most half its rows. Each part skips the effects that had happened, which covered all rows of the chunk; the
   others happen once a part. So nothing is lost or counted twice, and nothing is copied when all goes well.
3. Later chunks are not tried above the rows that failed. A single row is tried twice, the second time with all that
   the first had taken given back; when it fails again, ChunkOutOfMemory names what it needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from memfine_fx.errors import MemfineError
from memfine_fx.runtime.schedule import Chunk, split_chunk
from memfine_fx.units import readable_bytes

__all__ = ["ChunkOutOfMemory", "Progress", "is_allocation_failure", "run_chunks", "run_halved"]

ResultT = TypeVar("ResultT")
_ALLOCATION_TEXTS = ("DefaultCPUAllocator", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch says in a plain RuntimeError when memory could not be had; on CUDA it has a class of its own."""


class ChunkOutOfMemory(MemfineError, torch.OutOfMemoryError):
    """Memory ran out in a chunk of a single row; what handles `torch.OutOfMemoryError` handles this.

    Args:
        terms: (name, bytes) of what one row needs beyond what is already alive.
        cause: what the allocator said.
    """

    def __init__(self, terms: Sequence[tuple[str, int]], cause: str) -> None:
        self.terms = tuple(sorted(terms, key=lambda term: -term[1]))
        self.needed_bytes = sum(num_bytes for _, num_bytes in self.terms)
        self.cause = cause
        listed = ", ".join(f"{name} {readable_bytes(num_bytes)}" for name, num_bytes in self.terms)
        super().__init__(
            f"out of memory in a chunk of a single row, after halving its rows down to that: one row needs about "
            f"{readable_bytes(self.needed_bytes)} ({listed}). Free memory outside the experts: make the batch or "
            f"sequence smaller, or checkpoint the layers. The allocator said: {cause}"
        )


@dataclass
class Progress:
    """How many effects of a chunk have happened."""

    num_done: int = 0

    def complete(self, effects: Iterable[Callable[[], object]]) -> None:
        """Make the effects happen that have not yet, in order."""
        for number, effect in enumerate(effects):
            if number >= self.num_done:
                effect()
                self.num_done = number + 1


@dataclass(frozen=True)
class _Attempt:
    """A chunk to run, how many of its effects have happened, and whether it failed before as it is."""

    chunk: Chunk
    num_done: int = 0
    is_repeated: bool = False


def is_allocation_failure(error: BaseException) -> bool:
    """Whether memory for something could not be had, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATION_TEXTS)


def run_chunks(
    chunks: Sequence[Chunk],
    run: Callable[[Chunk, Progress], None],
    *,
    groups: bool,
    needs: Callable[[], Sequence[tuple[str, int]]],
) -> int | None:
    """Run every chunk, halving those whose allocations fail.

    Args:
        chunks: in walking order.
        run: one chunk; its effects go through `Progress.complete`.
        groups: whether a chunk may hold several whole experts.
        needs: (name, bytes) of what a single row needs, asked when it failed.

    Returns:
        The rows that a chunk may have from now on, or None when nothing failed.

    Raises:
        ChunkOutOfMemory: a single row failed twice.
    """
    limit: int | None = None
    for chunk in chunks:
        pending = [_Attempt(chunk)]
        while pending:
            attempt = pending.pop()
            part = attempt.chunk
            if limit is not None and part.num_rows > limit:
                parts = split_chunk(part, limit, groups=groups)
                pending.extend(_Attempt(smaller, attempt.num_done) for smaller in reversed(parts))
                continue
            progress = Progress(attempt.num_done)
            failure = _attempt(run, part, progress)
            if failure is None:
                continue
            if part.num_rows == 1 and attempt.is_repeated:
                raise ChunkOutOfMemory(needs(), failure)
            limit = (part.num_rows + 1) // 2
            pending.append(_Attempt(part, progress.num_done, is_repeated=True))
    return limit


def run_halved(
    run: Callable[[int], ResultT], rows: int, *, needs: Callable[[], Sequence[tuple[str, int]]]
) -> tuple[ResultT, int | None]:
    """Run a layer in one call, again from its start with half the rows at once where an allocation fails.

    Args:
        run: given the rows; it writes nothing that it does not write again.
        rows: to begin with.
        needs: as in `run_chunks`.

    Returns:
        Its result, and the rows that it may have from now on, or None when nothing failed.

    Raises:
        ChunkOutOfMemory: a single row failed twice.
    """
    limit: int | None = None
    is_repeated = False
    while True:
        results: list[ResultT] = []
        failure = _failure_of(lambda: results.append(run(rows)))  # noqa: B023  # called before the next round
        if failure is None:
            return results[0], limit
        if rows == 1 and is_repeated:
            raise ChunkOutOfMemory(needs(), failure)
        is_repeated = rows == 1
        limit = rows = (rows + 1) // 2


def _attempt(run: Callable[[Chunk, Progress], None], chunk: Chunk, progress: Progress) -> str | None:
    """Run a chunk; return the allocator's message where an allocation failed, or None where the chunk ran."""
    return _failure_of(lambda: run(chunk, progress))


def _failure_of(work: Callable[[], None]) -> str | None:
    """Run some work; return the allocator's message where an allocation failed, or None where the work was done.

    NOTE: only the text is returned. The error's traceback holds the frames, and these the chunk's tensors; it must
    be gone before the retry asks for memory.
    """
    try:
        work()
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, ChunkOutOfMemory) or not is_allocation_failure(error):
            raise
        return str(error)
    return None
