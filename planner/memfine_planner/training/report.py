"""A plan as text and as JSON."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from memfine_planner.training.plan import Plan
from memfine_planner.training.step import StepTime
from memfine_planner.training.sweep import Study
from memfine_planner.training.sweep_report import study_json
from memfine_planner.training.tuner import Candidate

__all__ = ["NO_PROGRESS", "cost_text", "front_table", "plan_json", "plan_text"]


def plan_text(plan: Plan, *, layers: bool = False) -> str:
    """The report in text; `layers` adds every term of every kind of layer."""
    parts = [
        _headline(plan),
        _terms(plan.loaded),
        _stages(plan),
        _risks(plan),
        _faults(plan),
        "why\n" + "\n".join(f"  {reason}" for reason in plan.reasons),
        f"Megatron-LM\n{plan.megatron}",
        f"torchtitan\n{plan.torchtitan}",
    ]
    if layers:
        parts.insert(2, _layers(plan.loaded))
    return "\n\n".join(parts)


def cost_text(plan: Plan, model: Literal["base", "optimised"], *, layers: bool = False) -> str:
    """One layer of the cost model alone, balanced routing."""
    step = plan.base if model == "base" else plan.step
    parts = [
        f"{plan.request.arch.name} on {plan.strategy.gpus} {plan.request.system.name}: {plan.strategy.label()}\n"
        f"  {model}: {step.seconds:.3f} s a step, {step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"MFU {step.utilisation:.1%}",
        _terms(step),
        _rank_times(step),
    ]
    return "\n\n".join([*parts, _layers(step)] if layers else parts)


def _rank_times(step: StepTime) -> str:
    lines = ["pipeline ranks, ms a micro-batch", f"  {'rank':>4}{'forward':>10}{'backward':>10}  largest parts"]
    for time in step.stages:
        largest = sorted(time.parts, key=lambda part: -part[1])[:4]
        text = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in largest)
        lines.append(f"  {time.rank:4}{1e3 * time.forward_s:10.2f}{1e3 * time.backward_s:10.2f}  {text}")
    return "\n".join(lines)


def front_table(front: tuple[Candidate, ...], limit: int = 10) -> str:
    """The Pareto front: speed, headroom in a bad iteration, goodput."""
    lines = [f"{'tokens/s/GPU':>12} {'MFU':>6} {'headroom':>9} {'goodput':>8}  strategy"]
    for candidate in front[:limit]:
        step = candidate.step
        lines.append(
            f"{step.tokens_per_s_per_gpu:12,.0f} {step.utilisation:6.1%} {candidate.headroom:9.1%} "
            f"{candidate.goodput.fraction:8.1%}  {candidate.strategy.label()}"
        )
    return "Pareto front, fastest first\n" + "\n".join(lines)


def _headline(plan: Plan) -> str:
    s, step, loaded = plan.strategy, plan.step, plan.loaded
    arch = plan.request.arch
    lines = [
        f"{arch.name} ({arch.params / 1e9:.1f}B parameters) on {s.gpus} {plan.request.system.name}",
        f"  {s.label()}",
        f"  {s.global_batch} sequences of {s.seq} tokens a step, {s.micro_batches} micro-batches a pipeline",
        f"  balanced routing: {step.seconds:.3f} s a step, {step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"{step.model_tflops_per_gpu:,.0f} model TFLOP/s/GPU, MFU {step.utilisation:.1%}",
    ]
    if loaded.seconds != step.seconds:
        lines.append(
            f"  {plan.request.routing.kind} routing, on average: {loaded.seconds:.3f} s, "
            f"{loaded.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        )
    lines.append(f"  base model without overlap and host limits: {plan.base.seconds:.3f} s")
    return "\n".join(lines)


def _terms(step: StepTime) -> str:
    lines = [f"where a step goes ({step.seconds:.3f} s, slowest stage)"]
    for name, seconds in sorted(step.terms, key=lambda term: -term[1]):
        if seconds > 0:
            lines.append(f"  {name:28} {seconds:9.3f} s {seconds / step.seconds:7.1%}")
    return "\n".join(lines)


def _layers(step: StepTime) -> str:
    lines = ["one micro-batch of a layer, each term alone, ms"]
    for name, layer in step.layers:
        lines.append(f"  {name}: {1e3 * layer.total_s:.3f} ms with overlap, host needs {1e3 * layer.host_s:.3f} ms")
        lines.append(f"    {'term':26}{'kind':9}{'forward':>9}{'backward':>10}{'recompute':>11}")
        lines += [
            f"    {term.name:26}{term.kind:9}{1e3 * term.forward_s:9.3f}{1e3 * term.backward_s:10.3f}"
            f"{1e3 * term.recompute_s:11.3f}"
            for term in layer.terms
        ]
    return "\n".join(lines)


def _stages(plan: Plan) -> str:
    lines = [
        f"pipeline ranks (usable memory {plan.usable_bytes / 1e9:.1f} GB)",
        f"  {'rank':>4}{'forward ms':>12}{'backward ms':>13}{'peak GB':>9}  largest terms, GB",
    ]
    for time, rank in zip(plan.loaded.stages, plan.ranks, strict=True):
        largest = sorted(rank.terms, key=lambda term: -term[1])[:4]
        text = ", ".join(f"{name} {num_bytes / 1e9:.1f}" for name, num_bytes in largest)
        lines.append(
            f"  {time.rank:4}{1e3 * time.forward_s:12.2f}{1e3 * time.backward_s:13.2f}{rank.peak / 1e9:9.1f}  {text}"
        )
    return "\n".join(lines)


def _risks(plan: Plan) -> str:
    lines = [
        "memory of the tightest rank by routing, GB",
        f"  {'routing':12}{'median':>9}{'p99':>9}{'p99.9':>9}{'most':>9}  out of memory per 1,000 iterations",
    ]
    for name, risk in plan.risks:
        shown = dict(risk.percentiles)
        chance = f"{risk.per_thousand:.1%} ({risk.per_iteration:.2%} of iterations)"
        if risk.per_iteration == 0:
            chance = f"none seen (resolution {risk.resolution:.2%} of iterations)"
        cells = "".join(f"{shown[p] / 1e9:9.1f}" for p in (50.0, 99.0, 99.9, 100.0))
        lines.append(f"  {name:12}{cells}  {chance}")
    return "\n".join(lines)


NO_PROGRESS = 1e-4
"""Goodput below which a job never gets anywhere."""


def _faults(plan: Plan) -> str:
    f, best = plan.faults, plan.faults.best
    if best.fraction < NO_PROGRESS:
        return "failures\n  the job fails before it can save: no progress (see the memory of the tightest rank)"
    crashes = f.model.crashes_per_hour
    counted = f", out of memory {24 * crashes:.2g} times a day among them" if crashes else ""
    lines = [
        "failures",
        f"  MTBF {best.mtbf / 3600:.1f} h{counted}; a checkpoint of {f.cost.num_bytes / 1e12:.2f} TB stops training "
        f"{f.cost.blocking:.1f} s and can be restored {f.cost.durable:.0f} s later",
        f"  best interval {best.interval:.0f} s (Young {f.young_s:.0f} s, Daly {f.daly_s:.0f} s)",
        f"  goodput {best.fraction:.1%}: saving {best.saving:.1%}, lost work {best.lost_work:.1%}, "
        f"down {best.down:.1%}, waiting for nodes {best.waiting:.1%}; simulated event by event {f.simulated:.1%}",
        *_history_lines(plan),
        f"  {plan.tokens / 1e12:g} T tokens in {f.days:.1f} days",
        "  goodput at multiples of the failure rate: "
        + ", ".join(f"{factor:g}x {result.fraction:.1%}" for factor, result in f.sensitivity),
    ]
    return "\n".join(lines)


def _history_lines(plan: Plan) -> list[str]:
    found, bounds = plan.request.reliability, plan.faults.bounds
    if found is None or bounds is None:
        return []
    model = plan.faults.model
    gaps = "exponential gaps" if model.shape == 1.0 else f"gaps in bursts or wear, Weibull shape {model.shape:.2f}"
    return [
        f"  from the history {found.history.name} ({gaps}): goodput {bounds[0].fraction:.1%} to "
        f"{bounds[1].fraction:.1%} at the 95% bounds of its rate, intervals {bounds[0].interval:.0f} to "
        f"{bounds[1].interval:.0f} s; {model.spares} spare nodes"
    ]


def plan_json(plan: Plan, front: tuple[Candidate, ...] = (), found: Study | None = None) -> str:
    """The same as JSON: SI units, fractions, names as in the records."""
    s = plan.strategy
    written: dict[str, Any] = {
        "model": plan.request.arch.name,
        "system": plan.request.system.name,
        "strategy": vars(s) | {"dp": s.dp, "micro_batches": s.micro_batches, "label": s.label()},
        "seconds_per_step": plan.step.seconds,
        "seconds_per_step_base": plan.base.seconds,
        "seconds_per_step_under_routing": plan.loaded.seconds,
        "routing": plan.request.routing.kind,
        "tokens_per_s_per_gpu": plan.loaded.tokens_per_s_per_gpu,
        "utilisation": plan.loaded.utilisation,
        "terms_s": dict(plan.loaded.terms),
        "terms_base_s": dict(plan.base.terms),
        "terms_balanced_s": dict(plan.step.terms),
        "layers": {name: [vars(term) for term in layer.terms] for name, layer in plan.loaded.layers},
        "stages": [
            vars(time) | {"parts": dict(time.parts), "memory": dict(rank.terms), "peak_bytes": rank.peak}
            for time, rank in zip(plan.loaded.stages, plan.ranks, strict=True)
        ],
        "usable_bytes": plan.usable_bytes,
        "memory_risk": {name: vars(risk) | {"percentiles": dict(risk.percentiles)} for name, risk in plan.risks},
        "faults": {
            "checkpoint": vars(plan.faults.cost),
            "best": vars(plan.faults.best),
            "young_s": plan.faults.young_s,
            "daly_s": plan.faults.daly_s,
            "days": plan.faults.days,
            "tokens": plan.tokens,
            "simulated_goodput": plan.faults.simulated,
            "model": vars(plan.faults.model),
            "goodput_bounds": plan.faults.bounds and [bound.fraction for bound in plan.faults.bounds],
            "sensitivity": {factor: vars(result) for factor, result in plan.faults.sensitivity},
        },
        "reasons": plan.reasons,
        "launch": {"megatron": vars(plan.megatron), "torchtitan": vars(plan.torchtitan)},
        "front": [
            {
                "strategy": candidate.strategy.label(),
                "tokens_per_s_per_gpu": candidate.step.tokens_per_s_per_gpu,
                "headroom": candidate.headroom,
                "goodput": candidate.goodput.fraction,
            }
            for candidate in front
        ],
    }
    if found:
        written["study"] = study_json(found)
    return json.dumps(_finite(written), indent=1)


def _finite(value: Any) -> Any:
    """JSON knows no infinity: a mean time between failures without failures is null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
