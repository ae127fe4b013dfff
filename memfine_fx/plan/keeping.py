"""From a budget of bytes to what a step keeps and how many rows its chunks have: a pure function of peaks and seconds.

Terms
    keepable    a result that forward may keep for backward, or that backward computes again: a matmul or
                attention, or what a chunked region can keep of its routed rows
    ranking     keepables of the last layer first, whose backward begins at once, so that keeping them hardly moves the
                peak; then by seconds spared per byte
    choice      the first so many of the ranking, what is left of the bytes for the next one of which a part may be
                kept, and rows a chunk

For each number of rows the longest front of the ranking that fits is found by bisection, since the peak only grows with
what is kept. Among these the one that takes least time is chosen; more rows where two take as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfine_fx.records import Keep

__all__ = ["Keepable", "StepChoice", "choose_step", "ranked"]


@dataclass(frozen=True)
class Keepable:
    """One result that may be kept.

    Args:
        name: of a costly result's node, or a region's site.
        num_bytes: it takes from forward to backward, beyond smaller choices of the same region.
        seconds: backward is spared.
        is_in_last_layer: whether its backward comes at once.
        keep: for a region, how much it keeps with this one; "nothing" for costly results.
        storages: names of the allocations that hold a costly result.
        is_divisible: whether a run may keep it of a part of its region's rows.
    """

    name: str
    num_bytes: int
    seconds: float
    is_in_last_layer: bool
    keep: Keep = "nothing"
    storages: tuple[str, ...] = ()
    is_divisible: bool = False


@dataclass(frozen=True)
class StepChoice:
    """What a step keeps.

    Args:
        num_kept: so many of the ranking, from the front.
        rows: a chunk may have; None for as many as time asks for.
        seconds: beyond a step that keeps all and has as many rows as time asks for.
        peak_bytes: of the step, without what is there before it and without `part`.
        part: what is kept of some rows beside these.
    """

    num_kept: int
    rows: int | None
    seconds: float
    peak_bytes: int
    part: Keepable | None = None


def ranked(keepables: Sequence[Keepable]) -> list[Keepable]:
    """Those worth keeping, best first. Choices of one region come in their order, or the larger ones not at all."""
    worth = [one for one in keepables if one.seconds > 0]
    # The sort is stable: choices of one region that are worth the same a byte stay in their order.
    worth.sort(key=lambda one: (not one.is_in_last_layer, -one.seconds / max(1, one.num_bytes)))
    return worth


def choose_step(
    ranking: Sequence[Keepable],
    rows_choices: Sequence[tuple[int | None, float]],
    peak_of: Callable[[int, int | None], int],
    available_bytes: int,
) -> StepChoice | None:
    """The choice that takes least time among those that fit, or None where none does.

    Args:
        ranking: from `ranked`.
        rows_choices: (rows, seconds beyond those of the first), most rows first.
        peak_of: (number kept, rows) -> bytes, growing in both.
        available_bytes: for the peak.
    """
    best: StepChoice | None = None
    for rows, slower in rows_choices:
        if peak_of(0, rows) > available_bytes:
            continue
        low, high = 0, len(ranking) + 1  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if peak_of(middle, rows) <= available_bytes else (low, middle)
        peak = peak_of(low, rows)
        seconds = slower + sum(one.seconds for one in ranking[low:])
        part = _next_divisible(ranking, low)
        if part is not None:
            seconds -= part.seconds * min(1.0, (available_bytes - peak) / max(1, part.num_bytes))
        if best is None or seconds < best.seconds:
            best = StepChoice(low, rows, seconds, peak, part)
    return best


def _next_divisible(ranking: Sequence[Keepable], num_kept: int) -> Keepable | None:
    """The best of what is left of which a part may be kept."""
    return next((one for one in ranking[num_kept:] if one.is_divisible), None)
