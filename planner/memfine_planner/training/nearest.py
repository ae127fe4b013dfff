"""What to do about a fixed strategy that cannot fit: the strategy with the fewest changes that does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from memfine_planner.costs.architectures import Architecture
from memfine_planner.costs.strategy import Strategy, StrategyError, check, divisors
from memfine_planner.hardware.systems import System
from memfine_planner.training.memory import ALPHA, memory
from memfine_planner.training.runs import preset
from memfine_planner.training.tuner import Request, fewest_gpus

__all__ = ["check_memory", "nearest_that_fits"]


def check_memory(request: Request, s: Strategy) -> None:
    """Raise StrategyError when the strategy does not fit even if every expert receives the same.

    The error names the tightest rank, what fills it, and the nearest strategy that fits.
    """
    usable = ALPHA * request.system.memory_bytes
    rank = max(memory(request.arch, request.system, s), key=lambda rank: rank.peak)
    if rank.peak <= usable:
        return
    largest = sorted(rank.terms, key=lambda term: -term[1])[:3]
    terms = ", ".join(f"{name} {num_bytes / 1e9:.1f} GB" for name, num_bytes in largest)
    changes = nearest_that_fits(request.arch, request.system, s)
    raise StrategyError(
        f"{s.label()} needs {rank.peak / 1e9:.1f} GB on rank {rank.rank} of {usable / 1e9:.1f} GB usable, "
        f"with balanced routing ({terms})",
        ", ".join(f"{name}={value}" for name, value in changes.items())
        or fewest_gpus(replace(request, fixed=(("tp", s.tp),))),
    )


def nearest_that_fits(arch: Architecture, sys: System, s: Strategy) -> dict[str, Any]:
    """The fewest fields to change, and to what, so that the strategy fits; empty if up to four changes do not help.

    Among as few changes, the first in the order of what costs least speed.
    """
    usable = ALPHA * sys.memory_bytes
    offers = _offers(arch, s)
    for count in range(1, len(offers) + 1):
        for names in combinations(offers, count):
            for changes in _products({name: offers[name] for name in names}):
                changed = _changed(arch, sys, s, changes)
                if changed and max(rank.peak for rank in memory(arch, sys, changed)) <= usable:
                    return changes
    return {}


def _offers(arch: Architecture, s: Strategy) -> dict[str, list[Any]]:
    """Values that save memory, gentlest first."""
    order = ["none", "selective", *(["experts"] if arch.is_moe else []), "full"]
    stages = [pp for pp in divisors(s.gpus) if s.pp < pp <= arch.layers]
    experts = [ep for ep in divisors(arch.experts) if ep > s.ep] if arch.is_moe else []
    offers: dict[str, list[Any]] = {
        "recompute": order[order.index(s.recompute) + 1 :],
        "micro_batch": [size for size in reversed(divisors(s.micro_batch)) if size < s.micro_batch],
        "ep": experts,
        "pp": stages,
        "zero": [zero for zero in (1, 3) if zero > s.zero and (zero == 1 or s.pp == 1)],
    }
    return {name: values for name, values in offers.items() if values}


def _products(offers: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    if not offers:
        yield {}
        return
    (name, values), *rest = offers.items()
    for value in values:
        for others in _products(dict(rest)):
            yield {name: value} | others


def _changed(arch: Architecture, sys: System, s: Strategy, changes: Mapping[str, Any]) -> Strategy | None:
    """The strategy with the changes, or None where that breaks a rule."""
    changed = replace(s, **changes)
    if "recompute" in changes:
        overlaps = preset(arch, sys, changed.vp, changed.recompute)["overlap_ep"]
        changed = replace(changed, overlap_ep=s.overlap_ep and overlaps)
    try:
        check(arch, sys, changed)
    except StrategyError:
        return None
    return changed
