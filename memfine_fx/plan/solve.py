"""The solver: what a step saves, what it recomputes, and how many rows its chunks have, in the least time.

Terms
    position      a moment of the step's timeline: a statement of forward or of backward
    live bytes    what is alive at a position
    alternative   one way to run the step (rows per chunk, a partition to start from): its seconds, its live bytes with
                  every item recomputed, and its items
    item          what is recomputed unless one of its choices is taken: a tensor, or what a region computes of its rows
    choice        saves units of an item (its rows; of a tensor the one unit): seconds spared, bytes at positions.
                  A further place to save to, as host memory, is a further choice with other spans.

A plan takes an alternative and at most one choice of each item. Live bytes exceed `available_bytes` nowhere, and
`saved_bytes` nowhere where something is saved. `solve` returns the plan that takes the fewest seconds.

Greedy: items that spare most seconds per byte first, later items first among equals, each with as many units as fit.
What is saved lives from its place in forward to the same place in backward, so spans are nested, and for divisible
items and nested spans greedy choices are the best (Edmonds, 1970, of polymatroids). Problems of at most `_FEW_ITEMS`
items are then searched, depth first: a branch is cut if the items that are left cannot spare enough even if fractions
of them could be saved (Dantzig, 1957). Such plans are the best of all (tests/plan/test_solve.py tries every plan).
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

__all__ = ["Alternative", "Choice", "Item", "Rows", "Span", "StepPlan", "StepProblem", "largest", "solve"]

_FEW_ITEMS = 12
_FEW_UNITS = 8
"""Of an item with more units, the search takes as many as fit, or none."""
_MOST_NODES = 5_000
"""Of the search of one alternative: a quarter of a second."""


@dataclass(frozen=True)
class Span:
    """Bytes of a choice from one position up to, not including, another.

    Args:
        unit_bytes: of each unit.
        whole_bytes: beside the units, where all are saved; negative where saving everything spares scratch.
        part_bytes: beside the units, where some are; never negative.
    """

    start: int
    stop: int
    unit_bytes: int
    whole_bytes: int = 0
    part_bytes: int = 0


@dataclass(frozen=True)
class Choice:
    """One way to save an item.

    Args:
        seconds: spared if all units are saved.
        spans: where which bytes come; no two overlap.
        num_units: that may be saved.
        least_units: the fewest of which saving some pays.
    """

    seconds: float
    spans: tuple[Span, ...]
    num_units: int = 1
    least_units: int = 1


@dataclass(frozen=True)
class Item:
    """A tensor, or rows of a region, that are recomputed unless one of the choices is taken."""

    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Alternative:
    """One way to run the step.

    Args:
        key: what the caller knows it by.
        seconds: beyond the fastest alternative, with every item recomputed.
        live_bytes: returns the live bytes at each position, with every item recomputed.
        items: returns the items, in the order of their places in forward.
    """

    key: Any
    seconds: float
    live_bytes: Callable[[], Sequence[int]]
    items: Callable[[], Sequence[Item]] = tuple


@dataclass(frozen=True)
class Rows(Sequence[Alternative]):
    """Alternatives with from `most` down to `least` rows per chunk, each slower than the one before it.

    Args:
        peak_bytes: of the step with so many rows, which grow with them.
    """

    most: int
    least: int
    peak_bytes: Callable[[int], int]

    def __len__(self) -> int:
        return max(0, self.most - self.least + 1)

    @overload
    def __getitem__(self, place: int) -> Alternative: ...
    @overload
    def __getitem__(self, place: slice) -> list[Alternative]: ...
    def __getitem__(self, place: int | slice) -> Alternative | list[Alternative]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        rows = self.most - place
        return Alternative(rows, float(place), lambda: [self.peak_bytes(rows)])


@dataclass(frozen=True)
class StepProblem:
    """The ways in which a step may run, and the bytes that it has.

    Args:
        alternatives: fastest first.
        available_bytes: at every position.
        saved_bytes: at positions where something is saved; None for `available_bytes`.
        is_monotone: whether no alternative has items, and none holds more than the one before it.
    """

    alternatives: Sequence[Alternative]
    available_bytes: int
    saved_bytes: int | None = None
    is_monotone: bool = False


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step.

    Args:
        key: of its alternative.
        seconds: of the alternative, less what is spared.
        peak_bytes: the most live bytes at any position.
        saved: item -> (number of its choice, units), of items of which something is saved.
    """

    key: Any
    seconds: float
    peak_bytes: int
    saved: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def solve(problem: StepProblem) -> StepPlan | None:
    """Return the plan that takes the fewest seconds, the first of equal ones; None where no plan fits."""
    if problem.is_monotone:
        ways = problem.alternatives
        # The fastest one usually fits, and each question is the peak of a whole step.
        is_first = bool(ways) and _fits(ways[0], problem)
        place = 0 if is_first else bisect_left(ways, True, lo=min(1, len(ways)), key=lambda way: _fits(way, problem))
        fitting = ways[place : place + 1]
        return StepPlan(fitting[0].key, fitting[0].seconds, max(fitting[0].live_bytes())) if fitting else None
    limit = problem.available_bytes if problem.saved_bytes is None else problem.saved_bytes
    best: StepPlan | None = None
    for alternative in problem.alternatives:
        items = alternative.items()
        least = alternative.seconds - sum(max(0.0, *(choice.seconds for choice in item.choices)) for item in items)
        if best is not None and least >= best.seconds:
            continue
        live = alternative.live_bytes()
        if max(live, default=0) > problem.available_bytes:
            continue
        spared, peak, saved = _Search(live, items, limit).best()
        if best is None or alternative.seconds - spared < best.seconds:
            best = StepPlan(alternative.key, alternative.seconds - spared, peak, saved)
    return best


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from `low`, which fits, to below `high` that fits, where more never fits better."""
    return low + bisect_left(range(low + 1, high), True, key=lambda number: not fits(number))


def _fits(alternative: Alternative, problem: StepProblem) -> bool:
    return max(alternative.live_bytes(), default=0) <= problem.available_bytes


@dataclass(frozen=True)
class _Part:
    """A span over segments of the timeline."""

    segments: range
    span: Span
    num_units: int

    def bytes_of(self, units: int) -> int:
        beside = self.span.whole_bytes if units == self.num_units else self.span.part_bytes
        return units * self.span.unit_bytes + beside

    @property
    def least_bytes(self) -> int:
        """Bytes of all units, of which a fraction of the units takes at least that fraction."""
        return self.num_units * self.span.unit_bytes + min(0, self.span.whole_bytes)


@dataclass(frozen=True)
class _Saving:
    """A choice of an item over segments of the timeline."""

    item: str
    number: int
    choice: Choice
    parts: tuple[_Part, ...]

    @property
    def seconds_per_byte(self) -> float:
        num_bytes = max((part.bytes_of(self.choice.num_units) for part in self.parts), default=1)
        return self.choice.seconds / max(1, num_bytes)

    def seconds_of(self, units: int) -> float:
        return self.choice.seconds * units / self.choice.num_units

    def least_bytes_at(self, segment: int) -> int:
        return sum(part.least_bytes for part in self.parts if segment in part.segments)


_Saved = dict[str, tuple[_Saving, int]]


class _Search:
    """The items of one alternative, and the bytes that are free beside what is saved so far.

    Args:
        live: bytes at each position.
        items: in the order of their places in forward.
        limit: bytes where something is saved.
    """

    def __init__(self, live: Sequence[int], items: Sequence[Item], limit: int) -> None:
        spans = [span for item in items for choice in item.choices for span in choice.spans]
        borders = {0, len(live), *(border for span in spans for border in (span.start, span.stop))}
        edges = sorted(border for border in borders if border <= len(live))
        # Between two borders no choice changes anything, so that the fullest position stands for all of them.
        self._free = [limit - max(live[start:stop]) for start, stop in itertools.pairwise(edges)]
        segment = {edge: number for number, edge in enumerate(edges)}

        def saving(item: Item, number: int, choice: Choice) -> _Saving:
            ranges = (range(segment[span.start], segment[min(span.stop, len(live))]) for span in choice.spans)
            parts = (_Part(own, span, choice.num_units) for own, span in zip(ranges, choice.spans, strict=True))
            return _Saving(item.name, number, choice, tuple(part for part in parts if part.segments))

        savings = [
            [saving(item, number, choice) for number, choice in enumerate(item.choices) if choice.seconds > 0]
            for item in reversed(items)
        ]
        self._items = sorted(filter(None, savings), key=lambda own: -max(saving.seconds_per_byte for saving in own))
        self._limit = limit
        self._best: tuple[float, _Saved] = (0.0, {})
        self._num_nodes = 0
        # Where an item has many units, greedy choices miss the best by less than a unit.
        many = [saving.choice for own in self._items for saving in own if saving.choice.num_units > _FEW_UNITS]
        self._negligible = sum(choice.seconds / choice.num_units for choice in many)

    def best(self) -> tuple[float, int, dict[str, tuple[int, int]]]:
        """Return the seconds that are spared, the most live bytes, and what is saved."""
        self._save_greedily()
        if len(self._items) <= _FEW_ITEMS:
            self._search(0, 0.0, {})
        spared, chosen = self._best
        for saving, units in chosen.values():
            self._take(saving, units)
        peak = self._limit - min(self._free, default=self._limit)
        return spared, peak, {name: (saving.number, units) for name, (saving, units) in chosen.items()}

    def _save_greedily(self) -> None:
        saved: _Saved = {}
        for own in self._items:
            fitting = [(saving, units) for saving in own if (units := self._most_units(saving))]
            if fitting:
                saving, units = max(fitting, key=lambda fit: fit[0].seconds_of(fit[1]))
                self._take(saving, units)
                saved[saving.item] = saving, units
        self._best = sum(saving.seconds_of(units) for saving, units in saved.values()), saved
        for saving, units in saved.values():
            self._take(saving, units, -1)

    def _most_units(self, saving: _Saving) -> int:
        """Return the most units that fit, 0 where too few do."""
        room = [(part, min(self._free[part.segments.start : part.segments.stop])) for part in saving.parts]
        total = saving.choice.num_units
        if all(part.bytes_of(total) <= free for part, free in room):
            return total
        if any(part.span.part_bytes > free for part, free in room):
            return 0
        counts = [
            (free - part.span.part_bytes) // part.span.unit_bytes for part, free in room if part.span.unit_bytes > 0
        ]
        most = min((total - 1, *counts))
        return most if most >= saving.choice.least_units else 0

    def _take(self, saving: _Saving, units: int, sign: int = 1) -> None:
        for part in saving.parts:
            num_bytes = sign * part.bytes_of(units)
            for segment in part.segments:
                self._free[segment] -= num_bytes

    def _search(self, depth: int, spared: float, saved: _Saved) -> None:
        """Try every plan that takes what is saved so far, unless it cannot be the best."""
        self._num_nodes += 1
        if spared > self._best[0] and self._is_within(saved):
            self._best = spared, dict(saved)
        if depth == len(self._items) or self._num_nodes > _MOST_NODES:
            return
        if spared + self._bound(depth) <= self._best[0] + self._negligible:
            return
        for saving in self._items[depth]:
            most, least = saving.choice.num_units, saving.choice.least_units
            # What lowers live bytes elsewhere may make room for more, so that all counts are tried where these are few.
            fitting = self._most_units(saving)
            counts = range(most, least - 1, -1) if most <= _FEW_UNITS else [fitting] if fitting else []
            for units in counts:
                self._take(saving, units)
                saved[saving.item] = saving, units
                self._search(depth + 1, spared + saving.seconds_of(units), saved)
                del saved[saving.item]
                self._take(saving, units, -1)
        self._search(depth + 1, spared, saved)

    def _is_within(self, saved: _Saved) -> bool:
        """Whether live bytes are within the limit wherever something is saved."""
        parts = (part for saving, _ in saved.values() for part in saving.parts)
        return all(min(self._free[part.segments.start : part.segments.stop]) >= 0 for part in parts)

    def _bound(self, depth: int) -> float:
        """Return seconds that the items from `depth` on cannot exceed: fractions of them, at the fullest position."""
        whole, wanted, left = self._left_by_depth[depth]
        if not wanted:
            return whole
        fullest = max(range(len(wanted)), key=lambda segment: wanted[segment] - self._free[segment])
        free, bound = float(max(0, self._free[fullest])), 0.0
        sizes = [(seconds, num_bytes[fullest]) for seconds, num_bytes in left]
        for seconds, num_bytes in sorted(sizes, key=lambda size: -size[0] / size[1] if size[1] else -math.inf):
            share = min(1.0, free / num_bytes) if num_bytes else 1.0
            bound, free = bound + share * seconds, free - share * num_bytes
        return min(whole, bound)

    @functools.cached_property
    def _left_by_depth(self) -> list[tuple[float, list[int], list[tuple[float, list[int]]]]]:
        """For each depth: seconds of the items from there on, bytes that they want at each segment, and both of each of
        their choices. The choices of an item count as if all could be taken, which bounds it from above. No bytes where
        an item may lower live bytes, since a bound by bytes is none there.
        """
        segments = range(len(self._free))
        by_depth: list[tuple[float, list[int], list[tuple[float, list[int]]]]] = [(0.0, [], [])]
        left: list[tuple[float, list[int]]] = []
        for own in reversed(self._items):
            left = [*left, *((saving.choice.seconds, [saving.least_bytes_at(at) for at in segments]) for saving in own)]
            is_lowered = any(min(num_bytes, default=0) < 0 for _, num_bytes in left)
            wanted = [] if is_lowered else [sum(num_bytes[at] for _, num_bytes in left) for at in segments]
            by_depth.append((by_depth[-1][0] + max(saving.choice.seconds for saving in own), wanted, left))
        return by_depth[::-1]
