"""One strategy looked at from all sides: step, memory under every routing, failures; and why it was chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from memfine_fx.errors import BudgetInfeasible
from memfine_planner.costs.strategy import Recompute, Strategy
from memfine_planner.training.faults import (
    CheckpointCost,
    FaultModel,
    Goodput,
    best_interval,
    checkpoint_cost,
    crash_rate,
    daly_interval,
    days_to,
    sensitivity,
    simulate,
    young_interval,
)
from memfine_planner.training.launch import Launch, megatron, torchtitan
from memfine_planner.training.memory import ALPHA, OomRisk, RankMemory, choose_chunks, choose_rows, memory, oom_risk
from memfine_planner.training.reliability import fault_model
from memfine_planner.training.routing import ROUTINGS, Routing
from memfine_planner.training.step import StepTime, step_time
from memfine_planner.training.tuner import Candidate, Request, Tuned, bad_peak, balanced_rows, loads, oom_chance

__all__ = ["FaultReport", "Plan", "make_plan", "reasons"]


@dataclass(frozen=True)
class FaultReport:
    """Goodput at the best interval, beside Young's and Daly's, days to the tokens, and how it moves with the rate.

    `model` holds the failures counted, running out of memory among them; `simulated` is the event simulation's goodput,
    `bounds` the goodput at the upper and lower 95% bounds of a history's rate.
    """

    cost: CheckpointCost
    best: Goodput
    young_s: float
    daly_s: float
    days: float
    sensitivity: tuple[tuple[float, Goodput], ...]
    model: FaultModel
    simulated: float
    bounds: tuple[Goodput, Goodput] | None = None


@dataclass(frozen=True)
class Plan:
    """Everything the report prints.

    Args:
        step: balanced routing; `base` the same without optimisations; `loaded` under the request's routing on average.
        risks: (routing, peaks and chance of running out of memory).
        tokens: that the days are counted to.
    """

    request: Request
    strategy: Strategy
    step: StepTime
    base: StepTime
    loaded: StepTime
    ranks: tuple[RankMemory, ...]
    risks: tuple[tuple[str, OomRisk], ...]
    faults: FaultReport
    tokens: float
    reasons: tuple[str, ...]
    megatron: Launch
    torchtitan: Launch

    @property
    def usable_bytes(self) -> float:
        return ALPHA * self.request.system.memory_bytes


def make_plan(
    request: Request, strategy: Strategy, tokens: float, tuned: Tuned | None = None, iterations: int = 2000
) -> Plan:
    """Evaluate a strategy; `tuned` adds the comparison with what else was found.

    Raises:
        StrategyError: the strategy breaks a rule.
    """
    arch, sys = request.arch, request.system
    step = step_time(arch, sys, strategy)
    base = step_time(arch, sys, strategy, model="base")
    rows = None
    if arch.is_moe and request.routing.kind != "balanced":
        rows = loads(request, strategy).mean * balanced_rows(arch, strategy)
    loaded = step_time(arch, sys, strategy, rows=rows)
    kinds = ROUTINGS if arch.is_moe else ("balanced",)
    risks = []
    for kind in kinds:
        routing = request.routing if kind == request.routing.kind else Routing(kind)  # type: ignore[arg-type]
        risks.append((kind, oom_risk(arch, sys, strategy, routing, iterations)))
    cost = checkpoint_cost(arch.params, strategy, sys, asynchronous=request.asynchronous)
    crashes = crash_rate(oom_chance(request, strategy), loaded.seconds)
    faults = replace(request.faults, crashes_per_hour=request.faults.crashes_per_hour + crashes)
    best = best_interval(cost, faults, request.gpus)
    report = FaultReport(
        cost,
        best,
        young_interval(cost.blocking, best.mtbf),
        daly_interval(cost.blocking, best.mtbf),
        days_to(tokens, loaded.tokens_per_s, best.fraction),
        tuple(sensitivity(cost, faults, request.gpus)),
        faults,
        simulate(best.interval, cost, faults, request.gpus, days=_failures_to_days(faults, request.gpus)),
        _goodput_bounds(request, cost, faults),
    )
    why = reasons(tuned) if tuned else [*binding(loaded), *_memory_advice(request, strategy)]
    return Plan(
        request,
        strategy,
        step,
        base,
        loaded,
        memory(arch, sys, strategy),
        tuple(risks),
        report,
        tokens,
        tuple(why),
        megatron(arch, strategy),
        torchtitan(arch, strategy),
    )


def _goodput_bounds(request: Request, cost: CheckpointCost, faults: FaultModel) -> tuple[Goodput, Goodput] | None:
    if request.reliability is None:
        return None
    worst, best = (fault_model(request.reliability, faults, at).rate_per_gpu_hour for at in _BOUNDS)
    return (
        best_interval(cost, replace(faults, rate_per_gpu_hour=worst), request.gpus),
        best_interval(cost, replace(faults, rate_per_gpu_hour=best), request.gpus),
    )


_BOUNDS: tuple[Literal["high"], Literal["low"]] = ("high", "low")
_SIMULATED_FAILURES = 3000


def _failures_to_days(faults: FaultModel, gpus: int) -> float:
    """A simulated time long enough for a goodput within a percent or so."""
    mtbf = faults.mtbf(gpus)
    return 1.0 if mtbf == float("inf") else _SIMULATED_FAILURES * mtbf / 86_400


_ADVICE = {
    "pipeline bubble": "more micro-batches or interleaving shrink it",
    "exposed EP communication": "a smaller EP inside one NVLink domain, or overlap with a neighbouring micro-batch",
    "exposed TP communication": "a smaller TP",
    "waiting for the host": "CUDA graphs, larger micro-batches or fewer local experts",
    "recomputation": "more memory a GPU would make it unnecessary",
    "memory-bound kernels": "fused kernels, or a number format with less casting",
    "FSDP gathers": "more tokens per micro-batch, or replicated weights",
    "gradient reduction": "a larger global batch",
    "weight gather": "a larger global batch",
    "head and loss": "balance the last stage",
    "offload": "a faster host link",
}


def binding(step: StepTime) -> list[str]:
    """What the step's time consists of, largest first, with what would change it."""
    ordered = sorted(step.terms, key=lambda term: -term[1])[:4]
    text = "; ".join(
        f"{name} {seconds / step.seconds:.0%}" + (f" ({_ADVICE[name]})" if name in _ADVICE else "")
        for name, seconds in ordered
    )
    return [f"The step is bound by {text}."]


def _memory_advice(request: Request, s: Strategy) -> list[str]:
    """Whether a fixed strategy survives bad iterations, and the c (MACT) or R that would make it."""
    usable = ALPHA * request.system.memory_bytes
    peak, rank = bad_peak(request, s)
    if peak <= usable:
        return []
    text = f"A bad iteration needs {peak / 1e9:.1f} GB of {usable / 1e9:.1f} GB usable on rank {rank.rank}"
    if not request.arch.is_moe:
        return [f"{text}: it does not fit."]
    measured = loads(request, s).bad_most * balanced_rows(request.arch, s)
    recomputations: tuple[Recompute, ...] = ("full",) if s.recompute == "full" else ("experts", "full")
    for recompute in recomputations:
        whole = replace(s, recompute=recompute, recompute_layers=None, chunks=1, rows_per_round=0)
        rank = bad_peak(request, whole)[1]
        try:
            chunks = choose_chunks(request.system, rank, measured, whole)
            rows = choose_rows(request.system, rank)
        except BudgetInfeasible:
            continue
        return [f"{text}; recompute={recompute} with c={chunks} (MACT) or with rounds of R={rows} rows would fit."]
    return [f"{text}; what does not depend on the routing is too much already: it cannot fit."]


def reasons(tuned: Tuned) -> list[str]:
    """Why the best strategy beats the next different ones, what binds it, and what memory keeps out."""
    best = tuned.best
    found = binding(best.step)
    seen = {_shape(best.strategy)}
    for other in sorted(tuned.candidates, key=lambda candidate: -candidate.useful_tokens_per_s):
        if _shape(other.strategy) in seen:
            continue
        seen.add(_shape(other.strategy))
        found.append(_compare(best, other))
        if len(seen) == 4:
            break
    usable = best.usable
    for miss in tuned.near_misses[:2]:
        found.append(
            f"Memory keeps out {miss.strategy.label()}: {best.step.seconds / miss.seconds - 1:.1%} faster, but a bad "
            f"iteration needs {miss.peak / 1e9:.1f} GB of {usable / 1e9:.1f} GB usable."
        )
    gain = f"{tuned.num_valid:,} valid strategies, {tuned.num_fitting:,} variants fit in memory"
    found.append(f"Searched: {gain}, {len(tuned.candidates):,} timed, {len(tuned.front)} on the Pareto front.")
    return found


def _shape(s: Strategy) -> tuple[int, int, int, str]:
    return s.tp, s.pp, s.ep, s.recompute


def _compare(best: Candidate, other: Candidate) -> str:
    mine, theirs = dict(best.step.terms), dict(other.step.terms)
    names = set(mine) | set(theirs)
    changes = sorted(((theirs.get(n, 0.0) - mine.get(n, 0.0), n) for n in names), key=lambda c: -abs(c[0]))
    text = ", ".join(f"{name} {change / best.step.seconds:+.1%}" for change, name in changes[:3])
    slower = best.useful_tokens_per_s / other.useful_tokens_per_s - 1
    failures = "" if other.goodput == best.goodput else f" goodput {other.goodput.fraction:.1%},"
    return (
        f"{other.strategy.label()} is {slower:.1%} slower (of the best step: {text});{failures} "
        f"headroom {other.headroom:.0%}."
    )
