"""Figures of a plan, as SVG text: the front, time and memory per stage, the timeline, risk, failures, what matters.

Drawn narrow, with text as text, so that a page can set them side by side or, on a phone, below each other.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memfine_fx.errors import ConfigError
from memfine_planner.files import write_text
from memfine_planner.training.faults import goodput_curve
from memfine_planner.training.pipeline import timeline
from memfine_planner.training.plan import Plan
from memfine_planner.training.report import NO_PROGRESS
from memfine_planner.training.sweep import Study
from memfine_planner.training.sweep_report import draw_elasticities, draw_range, draw_shares, draw_speed
from memfine_planner.training.tuner import Candidate, balanced_rows, loads

__all__ = ["figures", "write_figures"]

_SHOWN_STAGES = 16
_SHOWN_MICRO_BATCHES = 12
_SIZE = (4.6, 3.4)
_NAMED = 6
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e8eb",
    "axes.axisbelow": True,
}

_Draw = Callable[[Any], None]


def figures(plan: Plan, front: tuple[Candidate, ...] = (), found: Study | None = None) -> dict[str, str]:
    """Title -> SVG, in the order of a report.

    Args:
        front: of the search, where there was one.
        found: sweeps, where there were any.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'memfine-planner[figures]'") from None
    drawn: dict[str, str] = {}
    for title, draw in _figures(plan, front, found):
        # Ids of clips and markers must differ between figures of one page.
        with rc_context(_STYLE | {"svg.hashsalt": title}):
            figure = Figure(figsize=_SIZE, layout="constrained")
            draw(figure.subplots())
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
        drawn[title] = text.getvalue()[text.getvalue().index("<svg") :]
    return drawn


def _figures(plan: Plan, front: tuple[Candidate, ...], found: Study | None) -> list[tuple[str, _Draw]]:
    chosen: list[tuple[str, Callable[..., None], Any]] = [
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
        chosen.append(("How far each factor moves the speed", draw_range, found))
        if found.elasticities:
            chosen.append(("Elasticities", draw_elasticities, found))
        for swept in found.sweeps:
            if any(point.best for point in swept.points):
                chosen.append((f"Speed over {swept.factor}", draw_speed, swept))
                chosen.append((f"Where time goes over {swept.factor}", draw_shares, swept))
    return [(title, _given(draw, data)) for title, draw, data in chosen]


def _given(draw: Callable[..., None], data: Any) -> _Draw:
    return lambda axes: draw(axes, data)


def write_figures(
    plan: Plan, folder: Path, front: tuple[Candidate, ...] = (), found: Study | None = None
) -> list[Path]:
    """Write every figure as an SVG file named after its title; returns the paths."""
    written = []
    for title, svg in figures(plan, front, found).items():
        path = folder / f"{title.lower().replace(' ', '_')}.svg"
        write_text(path, svg, "the figure")
        written.append(path)
    return written


def _front(axes: Any, front: tuple[Candidate, ...]) -> None:
    speeds = [candidate.step.tokens_per_s_per_gpu for candidate in front]
    headrooms = [100 * candidate.headroom for candidate in front]
    axes.plot(headrooms, speeds, color="#9db4be", linewidth=1, zorder=1)
    kept = [100 * candidate.goodput.fraction for candidate in front]
    if max(kept) - min(kept) < 0.1:
        axes.scatter(headrooms, speeds, color="#2a7f9e", zorder=2)
    else:
        axes.figure.colorbar(axes.scatter(headrooms, speeds, c=kept, cmap="viridis", zorder=2), label="goodput, %")
    best = max(front, key=lambda candidate: candidate.useful_tokens_per_s)
    axes.scatter(
        [100 * best.headroom],
        [best.step.tokens_per_s_per_gpu],
        s=140,
        facecolors="none",
        edgecolors="#c2553a",
        zorder=3,
    )
    axes.annotate(
        "chosen",
        (100 * best.headroom, best.step.tokens_per_s_per_gpu),
        (0, 10),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
    axes.set_xlabel("memory left in a bad iteration, %")
    axes.set_ylabel("tokens/s/GPU")
    axes.set_ylim(0, 1.15 * max(speeds))  # the ring and its name are inside
    axes.margins(x=0.1)


def _terms(axes: Any, plan: Plan) -> None:
    step = plan.loaded
    terms = sorted(((name, s) for name, s in step.terms if s > 0.002 * step.seconds), key=lambda term: term[1])
    axes.barh([name for name, _ in terms], [seconds for _, seconds in terms], color="#2a7f9e")
    for row, (_, seconds) in enumerate(terms):
        axes.text(seconds, row, f" {seconds / step.seconds:.0%}", va="center", fontsize=8)
    axes.margins(x=0.12)
    axes.set_xlabel(f"s of a step of {step.seconds:.2f} s")


def _goodput_parts(axes: Any, plan: Plan) -> None:
    best = plan.faults.best
    parts = [
        ("training", best.fraction),
        ("saving", best.saving),
        ("repeated work", best.lost_work),
        ("down", best.down),
        ("waiting for nodes", best.waiting),
    ]
    parts.reverse()
    colors = ["#2a7f9e" if name == "training" else "#c2553a" for name, _ in parts]
    axes.barh([name for name, _ in parts], [100 * part for _, part in parts], color=colors)
    for row, (_, part) in enumerate(parts):
        axes.text(100 * part, row, f" {part:.1%}", va="center", fontsize=8)
    axes.set_xlim(0, 118)
    axes.set_xlabel("% of the wall-clock")


def _stacked(axes: Any, labels: list[str], stacks: list[dict[str, float]], unit: str, num_ranks: int) -> None:
    totals: dict[str, float] = {}
    for stack in stacks:
        for name, value in stack.items():
            totals[name] = totals.get(name, 0.0) + value
    bottom = np.zeros(len(stacks))
    ordered = sorted(totals, key=lambda key: -totals[key])
    for name in ordered[:_NAMED]:
        heights = np.array([stack.get(name, 0.0) for stack in stacks])
        if heights.max() > 0:
            axes.bar(labels, heights, bottom=bottom, label=name)
            bottom += heights
    rest = np.array([sum(stack.get(name, 0.0) for name in ordered[_NAMED:]) for stack in stacks])
    if rest.max() > 0:
        axes.bar(labels, rest, bottom=bottom, label="other", color="#9aa5ab")
    axes.set_xlabel("pipeline rank" if num_ranks == len(labels) else f"pipeline rank, {len(labels)} of {num_ranks}")
    axes.set_ylabel(unit)


def _legend_below(axes: Any) -> None:
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def _time_bars(axes: Any, plan: Plan) -> None:
    shown = plan.loaded.stages[:_SHOWN_STAGES]
    stacks = [{name: 1e3 * seconds for name, seconds in stage.parts} for stage in shown]
    _stacked(axes, [str(stage.rank) for stage in shown], stacks, "ms", len(plan.loaded.stages))
    _legend_below(axes)


def _memory_bars(axes: Any, plan: Plan) -> None:
    shown = plan.ranks[:_SHOWN_STAGES]
    stacks = [{name: num_bytes / 1e9 for name, num_bytes in rank.terms} for rank in shown]
    labels = [str(rank.rank) for rank in shown]
    _stacked(axes, labels, stacks, "GB, balanced routing", len(plan.ranks))
    axes.axhline(plan.usable_bytes / 1e9, color="black", linestyle="--", linewidth=1, label="usable")
    if plan.request.arch.is_moe:
        load, rows = loads(plan.request, plan.strategy), balanced_rows(plan.request.arch, plan.strategy)
        bad = [rank.peak_with(load.bad_mean * rows, load.bad_most * rows) / 1e9 for rank in shown]
        name = f"bad iteration, {plan.request.routing.kind}"
        axes.scatter(labels, bad, marker="_", s=180, color="#c2553a", linewidths=2, zorder=3, label=name)
    _legend_below(axes)


def _timeline(axes: Any, plan: Plan) -> None:
    s, stages = plan.strategy, plan.loaded.stages
    # Interleaved schedules run whole groups of pp micro-batches.
    group = s.pp if s.vp > 1 else 1
    micro_batches = min(s.micro_batches, -(-max(_SHOWN_MICRO_BATCHES, s.pp) // group) * group)
    events = timeline(
        [stage.forward_s for stage in stages], [stage.backward_s for stage in stages], s.vp, micro_batches
    )
    colors = {"F": (0.2, 0.4, 0.8), "B": (0.2, 0.6, 0.3)}
    for phase, name in (("F", "forward"), ("B", "backward")):
        axes.barh(0, 0, color=colors[phase], label=name)  # the legend's alone: each event has a shade of its own
    for event in events:
        if event.rank < _SHOWN_STAGES:
            color = (*colors[event.phase], 0.35 + 0.5 * (event.chunk + 1) / s.vp)
            axes.barh(
                event.rank,
                1e3 * (event.end - event.start),
                left=1e3 * event.start,
                color=color,
                edgecolor="w",
                linewidth=0.3,
            )
    axes.invert_yaxis()
    axes.set_yticks(range(min(len(stages), _SHOWN_STAGES)))
    axes.set_xlabel(f"ms, {micro_batches} of {s.micro_batches} micro-batches")
    axes.set_ylabel("pipeline rank")
    _legend_below(axes)


def _risk(axes: Any, plan: Plan) -> None:
    for name, risk in plan.risks:
        percentiles = [p for p, _ in risk.percentiles]
        axes.plot(range(len(percentiles)), [b / 1e9 for _, b in risk.percentiles], marker="o", label=name)
    axes.set_xticks(range(len(percentiles)), [f"{p:g}%" for p in percentiles])
    axes.axhline(plan.usable_bytes / 1e9, color="black", linestyle="--", linewidth=1, label="usable")
    axes.set_xlabel("percentile of iterations")
    axes.set_ylabel("peak, GB")
    axes.legend(fontsize=8)


def _interval(axes: Any, plan: Plan) -> None:
    best = plan.faults.best
    intervals = np.geomspace(max(1.0, best.interval / 20), best.interval * 50, 80)
    curve = goodput_curve(intervals, plan.faults.cost, plan.faults.model, plan.request.gpus)
    axes.semilogx(intervals, [100 * point.fraction for point in curve])
    axes.axvline(best.interval, linestyle="-", color="black", linewidth=1, label="best")
    axes.axvline(plan.faults.young_s, linestyle=":", color="tab:red", label="Young")
    axes.axvline(plan.faults.daly_s, linestyle="--", color="tab:orange", label="Daly")
    axes.set_xlabel("s of work between checkpoints")
    axes.set_ylabel("goodput, %")
    axes.legend(fontsize=8)


def _sensitivity(axes: Any, plan: Plan) -> None:
    factors = [factor for factor, _ in plan.faults.sensitivity]
    axes.semilogx(factors, [100 * result.fraction for _, result in plan.faults.sensitivity], marker="o")
    axes.set_xticks(factors, [f"{factor:g}x" for factor in factors])
    axes.minorticks_off()
    axes.set_xlabel("failure rate, as a multiple of the assumed one")
    axes.set_ylabel("goodput at the best interval, %")
