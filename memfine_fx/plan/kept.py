"""Of how many of its routed rows each region of a run keeps something: as many as leave the peak within a limit.

Terms
    optional    what a region may keep in a run, because its op has room for it
    lean        the same run in which no such region keeps anything
    stretch     positions of a direction at which keeping changes the live bytes

Keeping costs bytes from a region's op in forward to its op in backward: in later layers for a shorter time, and at
fewer positions. So the ones that spare most seconds per byte are tried first, the last layer first among equals, and
each keeps as many rows as leave every position within the limit. That number is a quotient, and nothing is searched:
live bytes grow by the same for each row, but for the region's own op, which needs other scratch where it keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memfine_fx.memory.liveness import GraphMemory, Workspace
from memfine_fx.memory.step import RunMemory, SizeOf

__all__ = ["SLACK", "KeepRows", "Stretch", "keep_rows", "kept_rows", "lean_of", "live_bytes"]

SLACK = 64
"""Where rows are kept up to a limit, this share of it stays free: records of bf16 miss up to 1.4% (scratch of kernels).
"""
_FEWEST = 64
"""Rows of which keeping something pays for the further chunk that the border between them and the others makes."""


@dataclass(frozen=True)
class Stretch:
    """Bytes more from one position up to, not including, another.

    Args:
        direction: 0 in forward, 1 in backward.
        row_bytes: for each row.
        of_all, of_part: more, or fewer, beside these, where something of all rows or of some is kept.
    """

    direction: int
    start: int
    stop: int
    row_bytes: int
    of_all: int = 0
    of_part: int = 0


@dataclass(frozen=True)
class KeepRows:
    """What one region may keep.

    Args:
        site: of the region.
        place: its number in forward; a later one is consumed earlier.
        num_rows: N.
        seconds_per_row: that backward is spared.
        seconds_per_byte: the same, by which regions are compared.
        stretches: where which bytes come; no two overlap.
    """

    site: str
    place: int
    num_rows: int
    seconds_per_row: float
    seconds_per_byte: float
    stretches: tuple[Stretch, ...]


def kept_rows(live: Sequence[Sequence[int]], keeps: Sequence[KeepRows], limit: int) -> dict[str, int]:
    """Site -> rows of which something is kept, where it is of any: nowhere is more alive than the limit for it.

    Args:
        live: bytes at each position of the lean run, in forward and in backward.
        keeps: what may be kept.
        limit: bytes that may be alive where something is kept.
    """
    now, kept = [list(one) for one in live], {}
    for keep in sorted(keeps, key=lambda one: (-one.seconds_per_byte, -one.place)):
        rows = _most_rows(now, keep, limit)
        if rows:
            kept[keep.site] = rows
            for one in keep.stretches:
                more = rows * one.row_bytes + (one.of_all if rows == keep.num_rows else one.of_part)
                direction = now[one.direction]
                direction[one.start : one.stop] = [num_bytes + more for num_bytes in direction[one.start : one.stop]]
    return kept


def _most_rows(now: Sequence[Sequence[int]], keep: KeepRows, limit: int) -> int:
    left = [(one, limit - max(now[one.direction][one.start : one.stop], default=0)) for one in keep.stretches]
    if all(keep.num_rows * one.row_bytes + one.of_all <= room for one, room in left):
        return keep.num_rows
    if any(one.of_part > room for one, room in left):
        return 0
    rows = min((room - one.of_part) // one.row_bytes for one, room in left if one.row_bytes)
    return 0 if rows < _FEWEST else min(rows, keep.num_rows - 1)


def keep_rows(run: RunMemory, size_of: SizeOf, behind: int = 0) -> list[KeepRows]:
    """What the regions of a run may keep, and where which bytes come.

    Args:
        run: whose record has room for all rows; it is read as if that were used.
        size_of: chunks.
        behind: positions behind forward at which what it keeps is alive too.
    """
    full = replace(run, kept=frozenset())
    assert full.forward is not None and full.backward is not None
    workspace = run.step.workspace(size_of, run.values)
    found: dict[str, list[Stretch]] = {site: [] for site in run.step.optional}
    for direction, memory in enumerate((full.forward, full.backward)):
        for site, pieces in _pieces(run, memory, workspace, behind if direction == 0 else 0).items():
            found[site] += _disjoint(direction, pieces)
    places = {call.site: place for place, call in enumerate(full.forward.calls) if call.phase == "forward"}
    return [_keep(run, site, places.get(site, 0), found[site]) for site in found if found[site]]


def _keep(run: RunMemory, site: str, place: int, stretches: Sequence[Stretch]) -> KeepRows:
    seconds = run.step.optional[site]
    row_bytes = max(one.row_bytes for one in stretches)
    return KeepRows(site, place, run.rows_of(site), seconds * row_bytes, seconds, tuple(stretches))


_Piece = tuple[int, int, int, int, int]
"""(start, stop, bytes a row, bytes beside them where something of all rows is kept, and of some)."""


def _pieces(run: RunMemory, memory: GraphMemory, workspace: Workspace, behind: int) -> dict[str, list[_Piece]]:
    """By site."""
    rows = {site: run.rows_of(site) for site in run.step.optional}
    pieces: dict[str, list[_Piece]] = {site: [] for site, num_rows in rows.items() if num_rows}
    for one, num_bytes in zip(memory.allocations, memory.bytes_at(run.values), strict=True):
        if one.kept_by in pieces:
            stop = memory.num_positions + behind if one.stop is None else one.stop
            pieces[one.kept_by].append((one.start, stop, num_bytes // rows[one.kept_by], 0, 0))
    for call in memory.calls:
        if call.site in pieces:
            lean = workspace(replace(call, kept_rows=0))
            of_all = workspace(replace(call, kept_rows=None)) - lean
            pieces[call.site].append((call.position, call.position + 1, 0, of_all, max(0, of_all)))
    return pieces


def _disjoint(direction: int, pieces: Sequence[_Piece]) -> Iterator[Stretch]:
    """Stretches none of which overlap, of pieces that may."""
    borders = sorted({border for piece in pieces for border in piece[:2]})
    for start, stop in itertools.pairwise(borders):
        own = [piece[2:] for piece in pieces if piece[0] <= start and stop <= piece[1]]
        if own:
            yield Stretch(direction, start, stop, *map(sum, zip(*own, strict=True)))


def lean_of(run: RunMemory) -> RunMemory:
    """The same run in which no region keeps anything that it need not."""
    return run.keeping({})


def live_bytes(run: RunMemory, size_of: SizeOf) -> list[list[int]]:
    """Live bytes of a run at each position of forward and backward, with what is alive beside it."""
    assert run.forward is not None and run.backward is not None
    workspace = run.step.workspace(size_of, run.values)
    forward, backward = (one.live_bytes(run.values, workspace) for one in (run.forward, run.backward))
    beside = run.saved_bytes + run.later_gradient_bytes
    return [[run.saved_bytes + one for one in forward], [beside + one for one in backward]]
