"""The order in which a layer's routed rows are walked: a pure function of offsets and plan.

A chunk is a run of rows in expert order: part of one expert, or (for compiled functions that take a group) several
    whole
experts. Chunks of one expert are near equal, so no tail is tiny.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Chunk", "cut_at", "even_rows", "rows_schedule", "split_chunk", "tokens_schedule"]

_STEPS = 16


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


def even_rows(offsets: Sequence[int], rows_per_chunk: int, held: int = 0) -> int:
    """Rows for groups of experts that make the chunks more even, and not more of them.

    Args:
        offsets: [E+1].
        rows_per_chunk: R, the most.
        held: kept as it is where it does, so that sizes do not change from step to step.

    Returns:
        A number of at most R, in sixteenths of it; no expert is split that R leaves whole.
    """
    counts = [stop - start for start, stop in itertools.pairwise(offsets)]
    fewest = _num_groups(counts, rows_per_chunk)
    largest = max((count for count in counts if count <= rows_per_chunk), default=0)
    if max(1, largest) <= held <= rows_per_chunk and _num_groups(counts, held) == fewest:
        return held
    step = -(-rows_per_chunk // _STEPS)
    low, high = max(largest, -(-sum(counts) // max(1, fewest))) // step, _STEPS  # `low` steps are too few
    # `high` always makes no more chunks than R does, so it may be used whether or not fewer rows would do too.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_groups(counts, middle * step) <= fewest else (middle, high)
    return min(rows_per_chunk, high * step)


def _num_groups(counts: Sequence[int], rows_per_chunk: int) -> int:
    """How many chunks `rows_schedule` makes of these experts in groups."""
    num_chunks, filled = 0, 0
    for count in counts:
        if filled and filled + count > rows_per_chunk:
            num_chunks, filled = num_chunks + 1, 0
        if count > rows_per_chunk:
            num_chunks += -(-count // rows_per_chunk)
        else:
            filled += count
    return num_chunks + (filled > 0)


def tokens_schedule(bounds: Sequence[Sequence[int]]) -> list[Chunk]:
    """Token slice by token slice, each slice's rows expert by expert (the paper's FCDA).

    Args:
        bounds: [S+1,E] as from `routing.SliceCounter.bounds`.
    """
    return [
        Chunk(start, stop, expert, (stop - start,), is_part=True, completes=False)
        for begin, end in itertools.pairwise(bounds)
        for expert, (start, stop) in enumerate(zip(begin, end, strict=True))
        if stop > start
    ]


def split_chunk(chunk: Chunk, rows_per_chunk: int, *, groups: bool) -> list[Chunk]:
    """The rows of a chunk in chunks of at most `rows_per_chunk`.

    Args:
        chunk: of any schedule.
        rows_per_chunk: R of the parts.
        groups: whether a part may hold several whole experts.
    """
    offsets = [chunk.start, *(chunk.start + end for end in chunk.ends)]
    return [
        replace(
            part,
            first_expert=part.first_expert + chunk.first_expert,
            is_part=part.is_part or chunk.is_part,
            completes=part.completes and chunk.completes,
        )
        for part in rows_schedule(offsets, rows_per_chunk, groups=groups)
    ]


def cut_at(chunks: Sequence[Chunk], row: int) -> list[Chunk]:
    """The same rows in the same order, in chunks none of which lies on both sides of the border before `row`."""
    return [part for chunk in chunks for part in _cut(chunk, row)]


def _cut(chunk: Chunk, row: int) -> Iterator[Chunk]:
    """Up to four chunks: whole experts before the border, both parts of the expert at it, whole experts behind it."""
    if not chunk.start < row < chunk.stop:
        yield chunk
        return
    offsets = [chunk.start, *(chunk.start + end for end in chunk.ends)]
    borders = {chunk.start, chunk.stop, row}
    for start, stop in itertools.pairwise(offsets):
        if start < row < stop and len(chunk.ends) > 1:
            borders |= {start, stop}
    for start, stop in itertools.pairwise(sorted(borders)):
        yield _between(chunk, offsets, start, stop)


def _between(chunk: Chunk, offsets: Sequence[int], start: int, stop: int) -> Chunk:
    """Rows [start, stop) of a chunk, of one expert or of several whole ones."""
    experts = [at for at, (low, high) in enumerate(itertools.pairwise(offsets)) if low < stop and high > start]
    first, last = experts[0], experts[-1]
    return Chunk(
        start,
        stop,
        chunk.first_expert + first,
        tuple(min(offsets[at + 1], stop) - start for at in range(first, last + 1)),
        is_part=chunk.is_part or offsets[first] < start or offsets[last + 1] > stop,
        completes=chunk.completes and offsets[last + 1] <= stop,
    )


def _parts(expert: int, start: int, stop: int, rows_per_chunk: int) -> Iterator[Chunk]:
    num_rows = stop - start
    num_parts = -(-num_rows // rows_per_chunk)
    # Parts that differ by one row at most: a short last one would cost a launch for little.
    bounds = [start + num_rows * part // num_parts for part in range(num_parts + 1)]
    for begin, end in itertools.pairwise(bounds):
        yield Chunk(begin, end, expert, (end - begin,), is_part=num_parts > 1, completes=end == stop)


def _whole(experts: list[tuple[int, int, int]]) -> Chunk:
    while experts[-1][1] == experts[-1][2]:
        experts.pop()
    first, start, _ = experts[0]
    return Chunk(
        start,
        experts[-1][2],
        first,
        tuple(stop - start for _, _, stop in experts),
        is_part=False,
        completes=True,
    )
