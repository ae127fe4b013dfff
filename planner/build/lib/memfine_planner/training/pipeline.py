"""The pipeline schedule event by event: 1F1B, plain or interleaved, for the timeline and to check the formula.

Order of a rank (Narayanan et al., arXiv 2104.04473): warm-up forwards, then one forward and one backward in turn, then
the remaining backwards. Forwards of chunk i wait for the rank before (or the last rank's chunk i-1), backwards for the
rank after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "schedule", "timeline"]


@dataclass(frozen=True)
class Event:
    """One forward or backward of one micro-batch through one chunk on one rank."""

    rank: int
    chunk: int
    micro_batch: int
    phase: Literal["F", "B"]
    start: float
    end: float


def schedule(rank: int, pp: int, vp: int, micro_batches: int) -> list[tuple[Literal["F", "B"], int, int]]:
    """(phase, chunk, micro-batch) in the order in which a rank runs them."""
    if vp == 1:
        forwards = [(0, m) for m in range(micro_batches)]
        backwards = forwards
        warmup = min(pp - rank - 1, micro_batches)
    else:
        groups = [range(first, min(first + pp, micro_batches)) for first in range(0, micro_batches, pp)]
        forwards = [(chunk, m) for group in groups for chunk in range(vp) for m in group]
        backwards = [(chunk, m) for group in groups for chunk in reversed(range(vp)) for m in group]
        warmup = min((pp - rank - 1) * 2 + (vp - 1) * pp, len(forwards))
    order: list[tuple[Literal["F", "B"], int, int]] = [("F", *forwards[i]) for i in range(warmup)]
    for index in range(warmup, len(forwards)):
        order += [("F", *forwards[index]), ("B", *backwards[index - warmup])]
    return order + [("B", *backwards[i]) for i in range(len(forwards) - warmup, len(forwards))]


def timeline(
    forward: Sequence[float], backward: Sequence[float], vp: int, micro_batches: int, send: float = 0.0
) -> list[Event]:
    """All events of a step.

    Args:
        forward, backward: seconds per micro-batch of each rank's whole stage; chunks take equal shares.
        send: seconds between two ranks.
    """
    pp = len(forward)
    orders = [schedule(rank, pp, vp, micro_batches) for rank in range(pp)]
    done: dict[tuple[str, int, int], float] = {}
    position, clock = [0] * pp, [0.0] * pp
    events: list[Event] = []
    last = pp * vp - 1
    while any(position[rank] < len(orders[rank]) for rank in range(pp)):
        progressed = False
        for rank in range(pp):
            while position[rank] < len(orders[rank]):
                phase, chunk, m = orders[rank][position[rank]]
                place = chunk * pp + rank
                if phase == "F":
                    ready = 0.0 if place == 0 else done.get(("F", place - 1, m), -1.0)
                else:
                    ready = done.get(("F", last, m) if place == last else ("B", place + 1, m), -1.0)
                if ready < 0:
                    break
                crosses = place != 0 if phase == "F" else place != last
                start = max(clock[rank], ready + (send if crosses else 0.0))
                end = start + (forward[rank] if phase == "F" else backward[rank]) / vp
                done[phase, place, m] = clock[rank] = end
                events.append(Event(rank, chunk, m, phase, start, end))
                position[rank] += 1
                progressed = True
        assert progressed, "the schedule waits for itself"
    return events
