"""Compute the peak memory of a step of many equal layers, from the records of three and of four of them.

Terms
    stretch      the positions of one graph's record between two calls of chunked experts, the later one included
    moment       the most live bytes of a stretch, and of what
    from front   the first, second, ... stretch; from back: the last, the last but one, ...

Why this is exact where layers are equal. Live bytes at a position are a sum over storages. Between a model of n and of
n + 1 equal layers, a position of the k-th layer counted from the front (or from the back) differs by what one more
layer saves, no more and no less: so its bytes are linear in n. Over the layers of one model, bytes at the same position
of the k-th layer are linear in k, so the largest stand in the first or in the last layer. Both are among those that the
shorter model has, so extending each of its moments by the difference to the longer one, and taking the largest, gives
the peak for any number. `is_uniform` holds a record to the assumption: every layer must save the same.

Which places are the same is read off what comes and goes in them (`aligned`), not off their number alone: a layer
beside one of another kind (the first ones are dense) may be recomputed in another order than those within.

Layers that repeat as a unit of several may begin with one that also saves what all share (the mask of a kind of
attention, made where it is first read). The line then begins at the second unit, which only the longer record has
within; it is extended too, by what the unit before or behind it is.

The plan that saves everything does so. The one of the smallest budget, and the one without a budget, do not: they
recompute what costs least of the whole step's FLOPs, so how much a layer saves depends on how many there are, and the
records of a few and of one more may be even where those of six are not. An extension of them is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from memfine_fx.memory.liveness import Allocation, Call, GraphMemory
from memfine_fx.memory.step import RunMemory, SizeOf

__all__ = [
    "PARTS",
    "Moment",
    "aligned",
    "fewest_repeats",
    "has_all_alike",
    "is_uniform",
    "moments_of",
    "part_of",
    "places_of",
    "stretched",
]

PARTS = ("gradients", "saved for backward", "working set of experts", "working set of the head", "temporary tensors")
_GRADIENTS, _SAVED, _EXPERTS, _HEAD, _PASSING = range(len(PARTS))


@dataclass(frozen=True)
class Moment:
    """The most live bytes of a stretch.

    Args:
        where: "forward" or "backward".
        parts: bytes by `PARTS`.
    """

    where: str
    parts: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts)

    def extended(self, longer: Moment, times: int) -> Moment:
        """Return this moment plus `times` the difference to a longer record's moment."""
        return self.extended_as(self, longer, times)

    def extended_as(self, shorter: Moment, longer: Moment, times: int) -> Moment:
        """Return this moment plus `times` the difference between two other moments."""
        parts = zip(self.parts, shorter.parts, longer.parts, strict=True)
        return Moment(self.where, tuple(mine + times * (more - less) for mine, less, more in parts))


def moments_of(runs: Sequence[RunMemory], size_of: SizeOf) -> list[list[Moment]]:
    """Return for each graph's forward and backward the moments of its stretches, in order."""
    moments = []
    for run, where, memory in _memories(runs):
        beside = run.saved_bytes, run.later_gradient_bytes if where == "backward" else 0
        moments.append(_moments(memory, where, run.values, run.step.workspace(size_of, run.values), beside))
    return moments


def _memories(runs: Sequence[RunMemory]) -> Iterator[tuple[RunMemory, str, GraphMemory]]:
    for run in runs:
        for where, memory in (("forward", run.forward), ("backward", run.backward)):
            if memory is not None:
                yield run, where, memory


def fewest_repeats(unit: int) -> int:
    """Return the shorter record's number of units of `unit` layers: the first and last layer are no neighbours then.

    What is saved between a first and a last layer that are neighbours is not what is saved between others.
    """
    return 3 if unit == 1 else 2


def stretched(
    shorts: list[list[Moment]], longs: list[list[Moment]], more: int, alike: Sequence[tuple[int, int]]
) -> Moment:
    """Return the peak of a longer step.

    Args:
        shorts, longs: moments with n repeats, and with one more.
        more: repeats of the step that is asked for, beyond n.
        alike: for each list of moments, see `aligned`.
    """
    candidates: list[Moment] = []
    for short, long, (from_front, from_back) in zip(shorts, longs, alike, strict=True):
        unit = len(long) - len(short)
        # Where a record changes too much to tell, its end takes the rest: gradients are there.
        from_back = max(from_back, len(short) - from_front)
        for place in (*range(from_front), *range(-from_back, 0)):
            within = place + unit if place >= 0 else place - unit
            candidates.append(short[place].extended(long[place], more))
            if -len(long) <= within < len(long):
                candidates.append(long[within].extended_as(short[place], long[place], more - 1))
    return max(candidates, key=lambda moment: moment.num_bytes)


def aligned(short: Sequence[RunMemory], long: Sequence[RunMemory]) -> list[tuple[int, int]]:
    """Return how many stretches of a record the longer one has too, from the front and from the back.

    Where the same bytes are allocated and freed at the same places of all stretches before (or behind), live bytes of
    both records differ by one number. Layers beside one of another kind, with another plan for recomputing, end that.

    Args:
        short, long: the same step with n units and with n + 1.

    Returns:
        For each graph's forward and backward both numbers.
    """
    counts = []
    for short_graph, long_graph in zip(_memories(short), _memories(long), strict=True):
        shorter, longer = (
            _changes_of_stretches(memory, where, run.values) for run, where, memory in (short_graph, long_graph)
        )
        # NOTE: the first stretch has the graph's inputs, of which a longer model has more.
        from_front = 1 + _num_alike(shorter[1:], longer[1:])
        counts.append((from_front, _num_alike(shorter[:0:-1], longer[:0:-1])))
    return counts


def _num_alike(some: Sequence[object], others: Sequence[object]) -> int:
    """Return how many items are equal before the first that are not."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False)))


def _changes_of_stretches(
    memory: GraphMemory, where: str, values: dict[str, int]
) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Return for each stretch the places in it where bytes are allocated or freed, and the change by part."""
    changes = list(zip(*_changes(memory, where, values), strict=True))
    return [
        [(place, change) for place, change in enumerate(changes[begin : end + 1]) if any(change)]
        for begin, end in _bounds(memory)
    ]


def is_uniform(short: Sequence[RunMemory], long: Sequence[RunMemory]) -> bool:
    """Return whether one more unit saves for backward what each before it saves, in every graph of a step.

    Args:
        short, long: the same step with n units and with n + 1.
    """
    if len(short) != len(long):
        return False
    for short_run, long_run in zip(short, long, strict=True):
        if short_run.step.forward is None or long_run.step.forward is None:
            return False
        if (short_run.step.backward is None) != (long_run.step.backward is None):
            return False
        short_saved, long_saved = (
            _saved_at_calls(memory, run)
            for memory, run in ((short_run.step.forward, short_run), (long_run.step.forward, long_run))
        )
        unit = len(long_saved) - len(short_saved)
        if unit < 1 or long_saved[: len(short_saved) - unit] != short_saved[: len(short_saved) - unit]:
            return False
        gaps = [later - earlier for earlier, later in zip(long_saved, long_saved[unit:], strict=False)]
        # The last layer may save less, its backward begins at once; or the first unit more, what all of them share.
        if len(set(gaps[:-1])) > 1 and len(set(gaps[unit - 1 :])) > 1:
            return False
    return True


def has_all_alike(short: Sequence[RunMemory], long: Sequence[RunMemory]) -> bool:
    """Return whether every stretch has its like in the longer record; otherwise an extension is an estimate."""
    numbers = [len(_bounds(memory)) for _, _, memory in _memories(short)]
    return all(front + back >= number for number, (front, back) in zip(numbers, aligned(short, long), strict=True))


def _saved_at_calls(memory: GraphMemory, run: RunMemory) -> list[int]:
    live = _live(memory, "forward", run.values, lambda call: 0)
    return [live[place][_SAVED] for place in places_of(memory)]


def _moments(
    memory: GraphMemory, where: str, values: dict[str, int], workspace: Callable[[Call], int], beside: tuple[int, int]
) -> list[Moment]:
    live = _live(memory, where, values, workspace)
    moments = []
    for begin, end in _bounds(memory):
        parts = list(max(live[begin : end + 1], key=sum, default=(0,) * len(PARTS)))
        parts[_SAVED] += beside[0]
        parts[_GRADIENTS] += beside[1]
        moments.append(Moment(where, tuple(parts)))
    return moments


def places_of(memory: GraphMemory) -> list[int]:
    """Return the positions where chunked experts run, or those of marks for layers in a step without them."""
    return [call.position for call in memory.calls if call.phase in ("forward", "backward", "mark")]


def _bounds(memory: GraphMemory) -> list[tuple[int, int]]:
    """Return the first and the last position of each stretch."""
    ends = [*places_of(memory), memory.num_positions - 1]
    return list(zip([0, *(end + 1 for end in ends)], ends, strict=False))


def part_of(allocation: Allocation, where: str) -> int:
    """Return which of `PARTS` an allocation of a forward or a backward counts for."""
    if allocation.is_input:
        return _SAVED
    if allocation.stop is not None:
        return _PASSING
    return _GRADIENTS if where == "backward" else _SAVED


def _changes(memory: GraphMemory, where: str, values: dict[str, int]) -> list[list[int]]:
    """Return for each of `PARTS` the change of live bytes at each position, and after the last."""
    changes = [[0] * (memory.num_positions + 1) for _ in PARTS]
    for allocation, num_bytes in zip(memory.allocations, memory.bytes_at(values), strict=True):
        of_part = changes[part_of(allocation, where)]
        of_part[allocation.start] += num_bytes
        if allocation.stop is not None:
            of_part[allocation.stop] -= num_bytes
    return changes


def _live(
    memory: GraphMemory, where: str, values: dict[str, int], workspace: Callable[[Call], int]
) -> list[tuple[int, ...]]:
    """Return the live bytes by `PARTS` at each position."""
    live = [list(accumulate(changes)) for changes in _changes(memory, where, values)]
    for call in memory.calls:
        live[_HEAD if call.phase == "head" else _EXPERTS][call.position] += workspace(call)
    return list(zip(*live, strict=True))[: memory.num_positions]
