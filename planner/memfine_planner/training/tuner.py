"""Which strategy: enumerate the valid ones, drop what cannot fit, time the rest, keep the Pareto front.

1. Every combination of the free sizes that breaks no rule (`space`).
2. Memory on every pipeline rank under the routing's bad iterations; strategies with chunked experts get the c or R
   that makes them fit. What does not fit is dropped, the nearest misses are remembered.
3. A lower bound on the step (arithmetic alone, at the best rate) drops what cannot come near the best found so far.
4. Step time for what is left; front over speed, memory headroom and goodput.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfine_fx.errors import BudgetInfeasible
from memfine_planner.costs.architectures import Architecture
from memfine_planner.costs.calibration import Calibration, fitted
from memfine_planner.costs.strategy import Strategy, StrategyError, check, divisors
from memfine_planner.hardware.systems import System
from memfine_planner.training.faults import (
    CheckpointCost,
    FaultModel,
    Goodput,
    best_interval,
    checkpoint_cost,
    crash_rate,
)
from memfine_planner.training.memory import ALPHA, RankMemory, choose_rows, memory
from memfine_planner.training.reliability import Reliability
from memfine_planner.training.routing import Routing, sample_rank_rows
from memfine_planner.training.runs import preset
from memfine_planner.training.stages import stages
from memfine_planner.training.step import StepTime, step_time

__all__ = [
    "Candidate",
    "Loads",
    "Request",
    "Tuned",
    "fewest_gpus",
    "loads",
    "oom_chance",
    "time_candidate",
    "tune",
    "variants",
]

_CHUNKS = (2, 4, 8)
_FEWEST_ROWS = 1024
_NEAR_MISS = 1.5
_BOUND = 1.6
"""A strategy whose lower bound is this many times the best time so far is not timed: it cannot be on the front."""


@dataclass(frozen=True)
class Request:
    """What is asked.

    Args:
        fixed: strategy fields that the user has chosen; the others are free.
        percentile: of the iterations that must fit, under `routing`.
        asynchronous: checkpoints are written while training goes on.
        reliability: the history that `faults` come from, if any; for the bounds of the goodput.
    """

    arch: Architecture
    system: System
    gpus: int
    global_batch: int
    seq: int
    precision: str
    routing: Routing = field(default_factory=Routing)
    faults: FaultModel = field(default_factory=FaultModel)
    fixed: tuple[tuple[str, Any], ...] = ()
    percentile: float = 99.9
    asynchronous: bool = True
    reliability: Reliability | None = None


@dataclass(frozen=True)
class Loads:
    """Rows of the fullest rank over balanced rows, under a routing: on average, and at a percentile of iterations.

    `bad_most` is the fullest layer's, `bad_mean` the mean over the layers, of the same bad iterations.
    """

    mean: float
    bad_mean: float
    bad_most: float


@dataclass(frozen=True)
class Candidate:
    """A strategy that fits.

    Args:
        step: time under the routing's average load.
        peak, usable: bytes of the tightest rank in a bad iteration, and what may be used.
        tight_rank: that rank's balanced terms.
    """

    strategy: Strategy
    step: StepTime
    peak: float
    usable: float
    tight_rank: RankMemory
    goodput: Goodput

    @property
    def headroom(self) -> float:
        """Fraction of the usable memory left in a bad iteration."""
        return 1 - self.peak / self.usable

    @property
    def useful_tokens_per_s(self) -> float:
        return self.step.tokens_per_s * self.goodput.fraction


@dataclass(frozen=True)
class NearMiss:
    """A strategy that would be faster than the best, but does not fit."""

    strategy: Strategy
    seconds: float
    peak: float


@dataclass(frozen=True)
class Tuned:
    """The answer: all candidates that were timed, fastest first, and the Pareto front among them."""

    request: Request
    candidates: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    near_misses: tuple[NearMiss, ...]
    num_valid: int
    num_fitting: int

    @property
    def best(self) -> Candidate:
        """The candidate that trains fastest after failures."""
        return max(self.candidates, key=lambda candidate: candidate.useful_tokens_per_s)


def tune(
    request: Request,
    calibration: Calibration | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tuned:
    """Search the space.

    Args:
        progress: called with (done, all) now and then.

    Raises:
        StrategyError: no combination keeps the rules (the message is that of the fixed choices), or none fits in
            memory (the message says what fills it and how many GPUs would do).
    """
    cal = calibration or fitted()
    valid = list(space(request))
    if not valid:
        check(request.arch, request.system, _plain(request))
        raise StrategyError(
            f"no strategy for {request.arch.name} on {request.gpus} GPUs with global_batch={request.global_batch} "
            f"and the fixed choices {dict(request.fixed)}",
            "fewer fixed choices, or a global batch with more divisors",
        )
    fitting, missed = _fitting(request, valid)
    if not fitting:
        raise _nothing_fits(request, missed)
    cost = checkpoint_cost(request.arch.params, valid[0], request.system, asynchronous=request.asynchronous)
    plain = best_interval(cost, request.faults, request.gpus)
    timed: list[Candidate] = []
    best = float("inf")
    fitting.sort(key=lambda fit: fit[3])
    for index, (strategy, peak, rank, bound) in enumerate(fitting):
        if progress and index % 50 == 0:
            progress(index, len(fitting))
        if bound > _BOUND * best:
            continue
        found = time_candidate(request, strategy, peak, rank, cal, cost, plain)
        best = min(best, found.step.seconds)
        timed.append(found)
    if progress:
        progress(len(fitting), len(fitting))
    timed.sort(key=lambda candidate: candidate.step.seconds)
    return Tuned(
        request, tuple(timed), _front(timed), _near_misses(request, missed, best, cal), len(valid), len(fitting)
    )


def time_candidate(
    request: Request,
    strategy: Strategy,
    peak: float,
    rank: RankMemory,
    cal: Calibration,
    cost: CheckpointCost,
    plain: Goodput,
) -> Candidate:
    """A strategy that fits, timed under the routing's average load.

    Args:
        peak, rank: of `bad_peak`.
        cost, plain: the request's checkpoint, and the goodput of a strategy that never runs out of memory.
    """
    step = step_time(request.arch, request.system, strategy, cal, rows=_mean_rows(request, strategy))
    crashes = crash_rate(oom_chance(request, strategy), step.seconds)
    kept = plain
    if crashes:
        faults = replace(request.faults, crashes_per_hour=request.faults.crashes_per_hour + crashes)
        kept = best_interval(cost, faults, request.gpus)
    return Candidate(strategy, step, peak, ALPHA * request.system.memory_bytes, rank, kept)


def space(request: Request) -> Iterator[Strategy]:
    """Every valid strategy; chunked experts appear once here, their c or R is chosen with the memory."""
    arch, sys, gpus = request.arch, request.system, request.gpus
    fixed = dict(request.fixed)
    powers = [d for d in divisors(gpus) if d & (d - 1) == 0 or d == gpus]
    choices: dict[str, Sequence[Any]] = {
        "tp": [d for d in powers if d <= min(8, sys.nvlink_domain)],
        "pp": [d for d in divisors(gpus) if d <= min(64, arch.layers)],
        "vp": [1, 2, 3, 4, 5, 6, 8, 12],
        "cp": [1] if request.seq <= 16_384 else [d for d in powers if d <= 16],
        "ep": [d for d in divisors(arch.experts) if d <= gpus] if arch.is_moe else [1],
        "zero": [1, 3],
        "micro_batch": [1, 2, 4, 8],
        "recompute": ["none", "selective", "full", *(["experts"] if arch.is_moe else [])],
    }
    for name, value in fixed.items():
        if name in choices:
            choices[name] = [value]
    others = {name: value for name, value in fixed.items() if name not in choices}
    for values in product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        if _is_wasteful(arch, sys, chosen, gpus) and not set(fixed) >= {"tp", "pp", "vp", "ep"}:
            continue
        options = preset(arch, sys, chosen["vp"], chosen["recompute"]) | chosen | others
        strategy = Strategy(
            gpus=gpus,
            global_batch=request.global_batch,
            seq=request.seq,
            precision=request.precision,
            **options,
        )
        try:
            check(arch, sys, strategy)
        except StrategyError:
            continue
        yield strategy


def _is_wasteful(arch: Architecture, sys: System, chosen: dict[str, Any], gpus: int) -> bool:
    """Quick refusals before a strategy is built: rules, and choices that never win."""
    tp, pp, vp, cp, ep = (chosen[name] for name in ("tp", "pp", "vp", "cp", "ep"))
    if gpus % (tp * pp * cp) or (vp > 1 and pp == 1) or pp * vp > arch.layers:
        return True
    if chosen["zero"] == 3 and pp > 1:
        return True
    # Chunks of unequal size only where nothing divides; experts shared by more ranks than a stage has.
    uneven = arch.layers % (pp * vp) and (arch.layers + 2) % (pp * vp)
    if uneven and vp > 1 and not arch.is_moe:
        return True
    return bool((gpus // pp) % ep)


def loads(request: Request, strategy: Strategy) -> Loads:
    """The routing's load on the fullest rank, relative to balanced."""
    return _loads(request.arch, strategy.ep, request.seq, request.routing, request.percentile)


@lru_cache(maxsize=512)
def _loads(arch: Architecture, ep: int, tokens: int, routing: Routing, percentile: float) -> Loads:
    if not arch.is_moe or ep == 1:
        return Loads(1.0, 1.0, 1.0)
    mean, most = _sampled(arch, ep, tokens, routing)
    return Loads(float(mean.mean()), float(np.percentile(mean, percentile)), float(np.percentile(most, percentile)))


@lru_cache(maxsize=512)
def _sampled(
    arch: Architecture, ep: int, tokens: int, routing: Routing
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows of the fullest rank over balanced rows, of 1,000 iterations: mean over the layers, and the fullest layer."""
    plain = Strategy(gpus=ep, ep=ep, seq=tokens, global_batch=ep)
    rows = sample_rank_rows(arch, plain, routing, iterations=1000) / (tokens * arch.top_k)
    return rows.mean(axis=1), rows.max(axis=1)


def oom_chance(request: Request, s: Strategy) -> float:
    """Fraction of the routing's iterations in which some rank runs out of memory."""
    usable = ALPHA * request.system.memory_bytes
    ranks = memory(request.arch, request.system, s)
    if not request.arch.is_moe or s.ep == 1:
        return float(any(rank.peak > usable for rank in ranks))
    mean, most = (load * balanced_rows(request.arch, s) for load in _sampled_loads(request, s))
    if all(rank.peak_with(mean.max(), most.max()) <= usable for rank in ranks):
        return 0.0
    over = np.zeros(len(mean), dtype=bool)
    for rank in ranks:
        capped = np.minimum(most, rank.rows_cap) if rank.rows_cap else most
        peaks = rank.without_rows + rank.saved_per_row * rank.moe_sets * mean + rank.working_per_row * capped
        over |= peaks > usable
    return float(over.mean())


def _sampled_loads(request: Request, s: Strategy) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return _sampled(request.arch, s.ep, request.seq, request.routing)


def balanced_rows(arch: Architecture, s: Strategy) -> float:
    """Rows that a rank receives per layer when every expert gets the same."""
    return s.local_tokens / s.tp * arch.top_k


def _mean_rows(request: Request, s: Strategy) -> float | None:
    if not request.arch.is_moe or request.routing.kind == "balanced":
        return None
    return loads(request, s).mean * balanced_rows(request.arch, s)


_Fit = tuple[Strategy, float, RankMemory, float]


def _fitting(request: Request, valid: Sequence[Strategy]) -> tuple[list[_Fit], list[_Fit]]:
    usable = ALPHA * request.system.memory_bytes
    fitting: list[_Fit] = []
    missed: list[_Fit] = []
    for strategy in valid:
        for variant in variants(request, strategy, usable):
            peak, rank = bad_peak(request, variant)
            fit = (variant, peak, rank, _bound(request, variant))
            (fitting if peak <= usable else missed).append(fit)
    return fitting, missed


def variants(request: Request, s: Strategy, usable: float) -> Iterator[Strategy]:
    """The strategy as it is, and, where its experts are recomputed and it does not fit, with the c and R that do."""
    can_chunk = request.arch.is_moe and s.recompute in ("experts", "full")
    is_given = any(name in ("chunks", "rows_per_round") for name, _ in request.fixed)
    if not can_chunk or is_given:
        yield s
        return
    yield s
    if bad_peak(request, s)[0] <= usable:
        return
    for chunks in _CHUNKS:
        chunked = replace(s, chunks=chunks)
        if bad_peak(request, chunked)[0] <= usable:
            yield chunked
            break
    try:
        most = min(choose_rows(request.system, rank) for rank in memory(request.arch, request.system, s))
    except BudgetInfeasible:
        return
    # Rounds that hold an ordinary iteration whole cost nothing in it; a larger R would only use up memory.
    ordinary = loads(request, s).mean * balanced_rows(request.arch, s)
    rows = min(most, -(-int(ordinary) // _FEWEST_ROWS) * _FEWEST_ROWS)
    if rows >= _FEWEST_ROWS:
        yield replace(s, rows_per_round=rows)


def bad_peak(request: Request, s: Strategy) -> tuple[float, RankMemory]:
    """Peak of the tightest rank in a bad iteration."""
    load = loads(request, s)
    rows = balanced_rows(request.arch, s) if request.arch.is_moe else 0.0
    ranks = memory(request.arch, request.system, s)
    peaks = [(rank.peak_with(load.bad_mean * rows, load.bad_most * rows), rank) for rank in ranks]
    return max(peaks, key=lambda entry: entry[0])


def _bound(request: Request, s: Strategy) -> float:
    """Seconds that the arithmetic alone takes at the full rate, bubble included."""
    arch = request.arch
    flops = arch.model_flops(s.seq) * s.tokens_per_step
    flops *= 4 / 3 if s.recompute == "full" else 1.0
    heaviest = max(stage.num_layers for stage in stages(arch, s.pp, s.vp)) * s.pp / arch.layers
    bubble = 1 + (s.pp - 1) / (s.vp * s.micro_batches)
    return flops / (s.gpus * request.system.rate(s.numbers.matmul)) * heaviest * bubble


def _front(timed: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in speed, headroom and goodput together; `timed` is fastest first."""
    front: list[Candidate] = []
    for candidate in timed:
        if not any(
            faster.headroom >= candidate.headroom - 1e-9
            and faster.goodput.fraction >= candidate.goodput.fraction - 1e-9
            for faster in front
        ):
            front.append(candidate)
    return tuple(front)


def _near_misses(request: Request, missed: Sequence[_Fit], best: float, cal: Calibration) -> tuple[NearMiss, ...]:
    usable = ALPHA * request.system.memory_bytes
    close = sorted((fit for fit in missed if fit[1] <= _NEAR_MISS * usable), key=lambda fit: fit[3])[:200]
    found = []
    for strategy, peak, _, _ in close:
        seconds = step_time(request.arch, request.system, strategy, cal, rows=_mean_rows(request, strategy)).seconds
        if seconds < best:
            found.append(NearMiss(strategy, seconds, peak))
    return tuple(sorted(found, key=lambda miss: miss.seconds)[:5])


def _nothing_fits(request: Request, missed: Sequence[_Fit]) -> StrategyError:
    """The tightest attempt, what fills it, and the number of GPUs with which something fits."""
    strategy, peak, rank, _ = min(missed, key=lambda fit: fit[1])
    usable = ALPHA * request.system.memory_bytes
    largest = sorted(rank.terms, key=lambda term: -term[1])[:3]
    terms = ", ".join(f"{name} {num_bytes / 1e9:.1f} GB" for name, num_bytes in largest)
    return StrategyError(
        f"no strategy fits: the tightest ({strategy.label()}) needs {peak / 1e9:.1f} GB on rank {rank.rank} of "
        f"{usable / 1e9:.1f} GB usable ({terms})",
        fewest_gpus(request),
    )


def fewest_gpus(request: Request) -> str:
    """The number of GPUs, doubled until the most frugal strategies fit, in words."""
    frugal = dict(request.fixed) | {"recompute": "full", "micro_batch": 1, "vp": 1}
    for factor in (2, 4, 8, 16, 32, 64, 128):
        gpus = request.gpus * factor
        larger = replace(request, gpus=gpus, global_batch=request.global_batch * factor, fixed=tuple(frugal.items()))
        if _fitting(larger, list(space(larger)))[0]:
            return f"gpus={gpus} (with recompute=full)"
    return "a smaller model, or fewer fixed choices"


def _plain(request: Request) -> Strategy:
    return Strategy(
        gpus=request.gpus,
        global_batch=request.global_batch,
        seq=request.seq,
        precision=request.precision,
        **dict(request.fixed),
    )
