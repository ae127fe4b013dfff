"""Charts of a plan: the front, time and memory per stage, the timeline, risk, failures, what matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memfine_fx.report.chart import (
    SERIES,
    Axis,
    Box,
    Chart,
    Line,
    Mark,
    Note,
    bars,
    chart_file,
    columns,
    level,
    moment,
)  # fmt: skip
from memfine_planner.files import write_text
from memfine_planner.training.faults import goodput_curve
from memfine_planner.training.pipeline import timeline
from memfine_planner.training.plan import Plan
from memfine_planner.training.report import NO_PROGRESS
from memfine_planner.training.sweep import Study
from memfine_planner.training.sweep_report import elasticity_chart, range_chart, shares_chart, speed_chart
from memfine_planner.training.tuner import Candidate, balanced_rows, loads

__all__ = ["figures", "write_figures"]

_SHOWN_STAGES = 16
_SHOWN_MICRO_BATCHES = 12
_DISTINCT = [SERIES[place] for place in (0, 4, 3, 7, 6, 9, 10)]
_NAMED = 6


def figures(plan: Plan, front: tuple[Candidate, ...] = (), found: Study | None = None) -> dict[str, Chart]:
    """Return title -> chart, in the order of a report.

    Args:
        front: of the search, where there was one.
        found: sweeps, where there were any.
    """
    chosen: list[tuple[str, Callable[[Any], Chart], Any]] = [
        ("Where a step goes", _terms, plan),
        ("Time of a micro-batch by pipeline rank", _time_bars, plan),
        ("Memory by pipeline rank", _memory_bars, plan),
        ("Peak memory by routing", _risk, plan),
        ("Where the time of a run goes", _goodput_parts, plan),
    ]
    if plan.faults.best.fraction >= NO_PROGRESS:
        chosen.append(("Goodput against the checkpoint interval", _interval, plan))
        chosen.append(("Goodput against the failure rate", _sensitivity, plan))
    if plan.strategy.pp > 1:
        chosen.insert(2, ("Pipeline timeline", _timeline, plan))
    if len(front) > 1:
        chosen.insert(0, ("Speed against headroom", _front, front))
    if found:
        chosen.append(("How far each factor moves the speed", range_chart, found))
        if found.elasticities:
            chosen.append(("Elasticities", elasticity_chart, found))
        for swept in found.sweeps:
            if any(point.best for point in swept.points):
                chosen.append((f"Speed over {swept.factor}", speed_chart, swept))
                chosen.append((f"Where time goes over {swept.factor}", shares_chart, swept))
    return {title: draw(data) for title, draw, data in chosen}


def write_figures(
    plan: Plan, folder: Path, front: tuple[Candidate, ...] = (), found: Study | None = None
) -> list[Path]:
    """Write every figure as an SVG file named after its title; returns the paths."""
    paths = []
    for title, chart in figures(plan, front, found).items():
        path = folder / f"{title.lower().replace(' ', '_')}.svg"
        write_text(path, chart_file([[(title, chart)]], width=520), "the figure")
        paths.append(path)
    return paths


def _front(front: tuple[Candidate, ...]) -> Chart:
    def place(candidate: Candidate) -> tuple[float, float]:
        return 100 * candidate.headroom, candidate.step.tokens_per_s_per_gpu

    best = max(front, key=lambda candidate: candidate.useful_tokens_per_s)
    marks: list[Mark] = [
        Line([place(candidate) for candidate in front], "strategies that none beats", has_dots=True),
        Line([place(best)], "chosen", "bad", "dots"),
        Note(*place(best), f"{best.goodput.fraction:.1%} goodput", is_apart=True),
    ]
    return Chart(Axis("memory left in a bad iteration, %"), Axis("tokens/s/GPU"), marks)


def _terms(plan: Plan) -> Chart:
    step = plan.loaded
    terms = sorted(((name, s) for name, s in step.terms if s > 0.002 * step.seconds), key=lambda term: -term[1])
    rows = [(name, seconds, f"{seconds / step.seconds:.0%}", "accent") for name, seconds in terms]
    return bars(rows, Axis(f"s of a step of {step.seconds:.2f} s"))


def _goodput_parts(plan: Plan) -> Chart:
    best = plan.faults.best
    parts = {
        "training": best.fraction,
        "saving": best.saving,
        "repeated work": best.lost_work,
        "down": best.down,
        "waiting for nodes": best.waiting,
    }
    rows = [
        (name, 100 * part, f"{part:.1%}", "accent" if name == "training" else "bad") for name, part in parts.items()
    ]
    return bars(rows, Axis("% of the wall-clock"))


def _stacked(stacks: list[Mapping[str, float]], unit: str, num_ranks: int, more: Sequence[Mark] = ()) -> Chart:
    """Return a column a pipeline rank: the largest terms by name, the others as one."""
    totals: dict[str, float] = {}
    for stack in stacks:
        for name, value in stack.items():
            totals[name] = totals.get(name, 0.0) + value
    ordered = sorted((name for name in totals if totals[name] > 0), key=lambda name: -totals[name])
    shown = [
        {name: stack.get(name, 0.0) for name in ordered[:_NAMED]}
        | {"other": sum(stack.get(name, 0.0) for name in ordered[_NAMED:])}
        for stack in stacks
    ]
    ranks = [(place, str(place)) for place in range(len(stacks))]
    label = "pipeline rank" if num_ranks == len(stacks) else f"pipeline rank, {len(stacks)} of {num_ranks}"
    x = Axis(label, -0.6, len(stacks) - 0.4, ticks=ranks)
    colours = dict(zip([*ordered[:_NAMED], "other"], _DISTINCT, strict=False))
    return Chart(x, Axis(unit), [*columns(shown, colours), *more])


def _time_bars(plan: Plan) -> Chart:
    shown = plan.loaded.stages[:_SHOWN_STAGES]
    stacks = [{name: 1e3 * seconds for name, seconds in stage.parts} for stage in shown]
    return _stacked([*stacks], "ms", len(plan.loaded.stages))


def _memory_bars(plan: Plan) -> Chart:
    shown = plan.ranks[:_SHOWN_STAGES]
    stacks = [{name: num_bytes / 1e9 for name, num_bytes in rank.terms} for rank in shown]
    more: list[Mark] = [level(plan.usable_bytes / 1e9, "usable", "ink")]
    if plan.request.arch.is_moe:
        load, rows = loads(plan.request, plan.strategy), balanced_rows(plan.request.arch, plan.strategy)
        peaks = [rank.peak_with(load.bad_mean * rows, load.bad_most * rows) / 1e9 for rank in shown]
        name = f"bad iteration, {plan.request.routing.kind} routing"
        more += [Line(((place - 0.4, peak), (place + 0.4, peak)), name, "bad") for place, peak in enumerate(peaks)]
    return _stacked([*stacks], "GB, balanced routing", len(plan.ranks), more)


def _timeline(plan: Plan) -> Chart:
    s, stages = plan.strategy, plan.loaded.stages
    # Interleaved schedules run whole groups of pp micro-batches.
    group = s.pp if s.vp > 1 else 1
    micro_batches = min(s.micro_batches, -(-max(_SHOWN_MICRO_BATCHES, s.pp) // group) * group)
    events = timeline(
        [stage.forward_s for stage in stages], [stage.backward_s for stage in stages], s.vp, micro_batches
    )
    phases = {"F": ("forward", "series0"), "B": ("backward", "series3")}
    marks = [
        Box(
            1e3 * event.start, 1e3 * event.end, -event.rank - 0.42, -event.rank + 0.42, *phases[event.phase],
            0.35 + 0.6 * (event.chunk + 1) / s.vp,
        )
        for event in events
        if event.rank < _SHOWN_STAGES
    ]  # fmt: skip
    num_shown = min(len(stages), _SHOWN_STAGES)
    ranks = Axis("pipeline rank", 0.6 - num_shown, 0.6, ticks=[(-rank, str(rank)) for rank in range(num_shown)])
    x = Axis(f"ms, {micro_batches} of {s.micro_batches} micro-batches", 0, max(1e3 * event.end for event in events))
    return Chart(x, ranks, marks, 20 + 15 * num_shown)


def _risk(plan: Plan) -> Chart:
    marks: list[Mark] = [
        Line([(place, num_bytes / 1e9) for place, (_, num_bytes) in enumerate(risk.percentiles)], name, colour,
             has_dots=True)
        for (name, risk), colour in zip(plan.risks, _DISTINCT, strict=False)
    ]  # fmt: skip
    percentiles = [(place, f"{p:g}%") for place, (p, _) in enumerate(plan.risks[0][1].percentiles)]
    marks.append(level(plan.usable_bytes / 1e9, "usable", "ink"))
    y = _near("peak memory, GB", [num_bytes / 1e9 for _, risk in plan.risks for _, num_bytes in risk.percentiles])
    return Chart(Axis("percentile of iterations", ticks=percentiles), y, marks)


def _interval(plan: Plan) -> Chart:
    best = plan.faults.best
    intervals = np.geomspace(max(1.0, best.interval / 20), best.interval * 50, 80)
    curve = goodput_curve(intervals, plan.faults.cost, plan.faults.model, plan.request.gpus)
    points = [(float(at), 100 * point.fraction) for at, point in zip(intervals, curve, strict=True)]
    chosen = moment(best.interval, "best", "ink"), moment(plan.faults.young_s, "Young", "bad")
    marks = [Line(points, "goodput"), *chosen, moment(plan.faults.daly_s, "Daly", "series4")]
    y = _near("goodput, %", [value for _, value in points])
    return Chart(Axis("s of work between checkpoints", is_log=True), y, marks)


def _sensitivity(plan: Plan) -> Chart:
    points = [(factor, 100 * result.fraction) for factor, result in plan.faults.sensitivity]
    factors = [(factor, f"{factor:g}x") for factor, _ in points]
    x = Axis("failure rate, as a multiple of the assumed one", is_log=True, ticks=factors)
    y = _near("goodput at the best interval, %", [value for _, value in points])
    return Chart(x, y, [Line(points, has_dots=True)])


def _near(label: str, values: list[float]) -> Axis:
    """Return an axis on which differences of values are seen, from 0 only where they are that large."""
    return Axis(label, max(0.0, min(values) - 2 * (max(values) - min(values))))
