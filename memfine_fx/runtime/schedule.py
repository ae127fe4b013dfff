"""The order in which a layer's routed rows are walked: a pure function of offsets and plan.

A chunk is a run of rows in expert order: part of one expert, or (for bodies that take a group) several whole
experts. Chunks of one expert are near equal, so no tail is tiny.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Chunk", "rows_schedule", "tokens_schedule"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, stop) in expert order, of experts [first_expert, last_expert].

    Args:
        ends: end of each expert's rows, counted from `start`.
        is_part: whether other chunks hold rows of the same expert.
        completes: whether this is known to be the last chunk of its experts.
    """

    start: int
    stop: int
    first_expert: int
    ends: tuple[int, ...]
    is_part: bool
    completes: bool

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def last_expert(self) -> int:
        return self.first_expert + len(self.ends) - 1


def rows_schedule(offsets: Sequence[int], rows_per_chunk: int, *, groups: bool) -> list[Chunk]:
    """Chunks of at most `rows_per_chunk` rows, expert by expert; an expert without rows has none.

    Args:
        offsets: [E+1].
        rows_per_chunk: R.
        groups: whether a chunk may hold several whole experts.
    """
    chunks: list[Chunk] = []
    pending: list[tuple[int, int, int]] = []
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets)):
        num_rows = stop - start
        if groups and pending and stop - pending[0][1] > rows_per_chunk:
            chunks.append(_whole(pending))
            pending = []
        if num_rows > rows_per_chunk or (not groups and num_rows):
            chunks.extend(_parts(expert, start, stop, rows_per_chunk))
        elif groups and (num_rows or pending):
            pending.append((expert, start, stop))
    if pending:
        chunks.append(_whole(pending))
    return chunks


def tokens_schedule(bounds: Sequence[Sequence[int]]) -> list[Chunk]:
    """Token slice by token slice, each slice's rows expert by expert (the paper's FCDA).

    Args:
        bounds: [S+1,E] as from `routing.token_slice_bounds`.
    """
    return [
        Chunk(start, stop, expert, (stop - start,), is_part=True, completes=False)
        for begin, end in itertools.pairwise(bounds)
        for expert, (start, stop) in enumerate(zip(begin, end, strict=True))
        if stop > start
    ]


def _parts(expert: int, start: int, stop: int, rows_per_chunk: int) -> Iterator[Chunk]:
    num_rows = stop - start
    num_parts = -(-num_rows // rows_per_chunk)
    bounds = [start + num_rows * part // num_parts for part in range(num_parts + 1)]
    for begin, end in itertools.pairwise(bounds):
        yield Chunk(begin, end, expert, (end - begin,), is_part=num_parts > 1, completes=end == stop)


def _whole(experts: list[tuple[int, int, int]]) -> Chunk:
    first, start, _ = experts[0]
    return Chunk(
        start,
        experts[-1][2],
        first,
        tuple(stop - start for _, _, stop in experts),
        is_part=False,
        completes=True,
    )
