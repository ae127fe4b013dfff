"""Free keeps: where it is asked, regions keep what leaves the peak of the whole step where it is.

Terms
    optional    what a region may keep in a run, because its op has room for it
    lean        the same run in which no region keeps anything; its peak is the limit
    stretch     positions of a direction at which keeping changes the live bytes

Gradients pile up while what was kept is consumed, so a step is usually largest at the end of backward, or at its head,
and most of what would be kept is there at neither. Keeping costs bytes from a region's op in forward to its op in
backward: in later layers for a shorter time, and at fewer positions. So the ones that spare most seconds per byte are
tried first, the last layer first among equals, and each is taken if no position comes above the limit.

The rows of a chunk depend on the routing of the step, which nobody knows before it. So the limit is the lean peak with
chunks of one row, and what comes under it has chunks as large as the plan allows: it holds for any routing.

Parameters, gradients that exist, optimizer state and inputs are the same in both runs, as is what an optimizer takes
when it steps. Only positions of the run itself are compared, so nothing of that need be known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memfine_fx.config import FREE, Config
from memfine_fx.memory.liveness import Call, GraphMemory, Workspace
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import RunMemory
from memfine_fx.plan.peaks import chunk_sizes

__all__ = ["FreeKeep", "Stretch", "describe_budget", "dropped_sites", "kept_for_free"]

_SLACK = 64
"""Where something is kept, this share of the limit stays free: records of bf16 miss up to 1.4% (scratch of kernels)."""


@dataclass(frozen=True)
class Stretch:
    """So many bytes more (or fewer) from one position up to, not including, another.

    Args:
        direction: 0 in forward, 1 in backward.
    """

    direction: int
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class FreeKeep:
    """What one region may keep.

    Args:
        site: of the region.
        place: its number in forward; a later one is consumed earlier.
        seconds_per_byte: that backward is spared.
        stretches: where which bytes come.
    """

    site: str
    place: int
    seconds_per_byte: float
    stretches: tuple[Stretch, ...]


def kept_for_free(live: Sequence[Sequence[int]], keeps: Sequence[FreeKeep], limit: int) -> frozenset[str]:
    """Sites that keep, so that nowhere that something is kept more is alive than the limit.

    Args:
        live: bytes at each position of the lean run, in forward and in backward.
        keeps: what may be kept.
        limit: bytes that the lean run has at its peak in any case.
    """
    limit -= limit // _SLACK
    now, kept = [list(one) for one in live], set()
    for keep in sorted(keeps, key=lambda one: (-one.seconds_per_byte, -one.place)):
        trial = [list(one) for one in now]
        for stretch in keep.stretches:
            direction = trial[stretch.direction]
            more = stretch.num_bytes
            direction[stretch.start : stretch.stop] = [one + more for one in direction[stretch.start : stretch.stop]]
        if all(max(trial[one.direction][one.start : one.stop], default=0) <= limit for one in keep.stretches):
            now = trial
            kept.add(keep.site)
    return frozenset(kept)


def dropped_sites(config: Config, run: RunMemory) -> frozenset[str]:
    """Sites that keep nothing in a run, because its peak would rise."""
    optional = run.step.optional
    lean = replace(run, drops=frozenset(optional))
    if lean.forward is None or lean.backward is None:
        return lean.drops
    values = run.values
    planned = chunk_sizes(config, run.step, None, None)
    workspace = run.step.workspace(planned, values)
    live = _live(lean, workspace)

    def smallest(site: str, num_tokens: int) -> ChunkSize:
        return planned(site, num_tokens) if site in run.step.heads else ChunkSize(1, stages=False)

    limit = max(max(one, default=0) for one in _live(lean, run.step.workspace(smallest, values)))
    full = replace(run, drops=frozenset())
    assert full.forward is not None and full.backward is not None
    stretches: dict[str, list[Stretch]] = {site: [] for site in optional}
    for direction, memory in enumerate((full.forward, full.backward)):
        for site, stretch in _stretches(direction, memory, values):
            if site in stretches:
                stretches[site].append(stretch)
        for call in memory.calls:
            if call.site in stretches:
                more = workspace(call) - workspace(_plain(call))
                stretches[call.site].append(Stretch(direction, call.position, call.position + 1, more))
    places = {site: place for place, site in enumerate(_order(full.forward))}
    keeps = [FreeKeep(site, places.get(site, 0), seconds, tuple(stretches[site])) for site, seconds in optional.items()]
    return lean.drops - kept_for_free(live, keeps, limit)


def describe_budget(config: Config, runs: Sequence[RunMemory]) -> str:
    """By which budget a step's runs were planned, in words."""
    if config.has_budget:
        return f"memory_budget={config.memory_budget!r} bounds the bytes of a step"
    if config.memory_budget != FREE:
        return "no memory_budget: regions keep nothing"
    steps = {id(run.step): run for run in runs}.values()
    num_optional = sum(len(run.step.optional) for run in steps)
    if not num_optional:
        return (
            'memory_budget="free", but regions keep nothing: that is for graphs which return their loss, compiled by '
            "Inductor for a CPU, and where the memory of the whole step is known"
        )
    num_kept = num_optional - sum(len(run.drops) for run in steps)
    return f'memory_budget="free": {num_kept} of {num_optional} regions keep what leaves the step\'s peak where it is'


def _live(run: RunMemory, workspace: Workspace) -> list[list[int]]:
    """Live bytes of a run at each position of forward and backward, with what is alive beside it."""
    assert run.forward is not None and run.backward is not None
    forward, backward = (one.live_bytes(run.values, workspace) for one in (run.forward, run.backward))
    beside = run.saved_bytes + run.later_gradient_bytes
    return [[run.saved_bytes + one for one in forward], [beside + one for one in backward]]


def _stretches(direction: int, memory: GraphMemory, values: dict[str, int]) -> Iterator[tuple[str, Stretch]]:
    """What regions keep, with their sites."""
    for one, num_bytes in zip(memory.allocations, memory.bytes_at(values), strict=True):
        if one.kept_by:
            stop = memory.num_positions if one.stop is None else one.stop
            yield one.kept_by, Stretch(direction, one.start, stop, num_bytes)


def _plain(call: Call) -> Call:
    return replace(call, keep="nothing")


def _order(forward: GraphMemory) -> list[str]:
    return [call.site for call in forward.calls if call.phase == "forward"]
