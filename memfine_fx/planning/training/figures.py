"""Figures of a plan, as SVG text: time and memory per stage, the pipeline's timeline, risk, failures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from memfine_fx.errors import ConfigError
from memfine_fx.planning.training.faults import goodput_curve
from memfine_fx.planning.training.pipeline import timeline
from memfine_fx.planning.training.plan import Plan

__all__ = ["figures", "write_figures"]

_SHOWN_STAGES = 16
_SHOWN_MICRO_BATCHES = 12


def figures(plan: Plan) -> dict[str, str]:
    """Title -> SVG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'memfine-fx[cluster]'") from None
    drawn: dict[str, str] = {}
    for title, draw, size in (
        ("Time of a micro-batch by pipeline rank", _time_bars, (8.0, 4.0)),
        ("Memory by pipeline rank", _memory_bars, (8.0, 4.0)),
        ("Pipeline timeline", _timeline, (9.0, 3.5)),
        ("Peak memory by routing", _risk, (6.0, 3.5)),
        ("Goodput against the checkpoint interval", _interval, (6.0, 3.5)),
        ("Goodput against the failure rate", _sensitivity, (6.0, 3.5)),
    ):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots(), plan)
        text = io.StringIO()
        figure.savefig(text, format="svg")
        drawn[title] = text.getvalue()[text.getvalue().index("<svg") :]
    return drawn


def write_figures(plan: Plan, folder: Path) -> list[Path]:
    """Write every figure as an SVG file named after its title; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for title, svg in figures(plan).items():
        path = folder / f"{title.lower().replace(' ', '_')}.svg"
        path.write_text(svg)
        written.append(path)
    return written


def _stacked(axes: Any, labels: list[str], stacks: list[dict[str, float]], unit: str) -> None:
    totals: dict[str, float] = {}
    for stack in stacks:
        for name, value in stack.items():
            totals[name] = totals.get(name, 0.0) + value
    bottom = np.zeros(len(stacks))
    for name in sorted(totals, key=lambda key: -totals[key]):
        heights = np.array([stack.get(name, 0.0) for stack in stacks])
        if heights.max() > 0:
            axes.bar(labels, heights, bottom=bottom, label=name)
            bottom += heights
    axes.set_xlabel("pipeline rank")
    axes.set_ylabel(unit)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _time_bars(axes: Any, plan: Plan) -> None:
    shown = plan.loaded.stages[:_SHOWN_STAGES]
    stacks = [{name: 1e3 * seconds for name, seconds in stage.parts} for stage in shown]
    _stacked(axes, [str(stage.rank) for stage in shown], stacks, "ms")


def _memory_bars(axes: Any, plan: Plan) -> None:
    shown = plan.ranks[:_SHOWN_STAGES]
    stacks = [{name: num_bytes / 1e9 for name, num_bytes in rank.terms} for rank in shown]
    _stacked(axes, [str(rank.rank) for rank in shown], stacks, "GB")
    axes.axhline(plan.usable_bytes / 1e9, color="black", linestyle="--", linewidth=1)


def _timeline(axes: Any, plan: Plan) -> None:
    s, stages = plan.strategy, plan.loaded.stages
    # Interleaved schedules run whole groups of pp micro-batches.
    group = s.pp if s.vp > 1 else 1
    micro_batches = min(s.micro_batches, -(-max(_SHOWN_MICRO_BATCHES, s.pp) // group) * group)
    events = timeline(
        [stage.forward_s for stage in stages], [stage.backward_s for stage in stages], s.vp, micro_batches
    )
    for event in events:
        if event.rank < _SHOWN_STAGES:
            shade = 0.35 + 0.5 * (event.chunk + 1) / s.vp
            color = (0.2, 0.4, 0.8, shade) if event.phase == "F" else (0.2, 0.6, 0.3, shade)
            axes.barh(event.rank, 1e3 * (event.end - event.start), left=1e3 * event.start, color=color, edgecolor="w")
    axes.invert_yaxis()
    axes.set_yticks(range(min(len(stages), _SHOWN_STAGES)))
    axes.set_xlabel(f"ms, {micro_batches} of {s.micro_batches} micro-batches; blue forward, green backward")
    axes.set_ylabel("pipeline rank")


def _risk(axes: Any, plan: Plan) -> None:
    for name, risk in plan.risks:
        percentiles = [p for p, _ in risk.percentiles]
        axes.plot(range(len(percentiles)), [b / 1e9 for _, b in risk.percentiles], marker="o", label=name)
    axes.set_xticks(range(len(percentiles)), [f"{p:g}%" for p in percentiles])
    axes.axhline(plan.usable_bytes / 1e9, color="black", linestyle="--", linewidth=1, label="usable")
    axes.set_xlabel("percentile of iterations")
    axes.set_ylabel("peak, GB")
    axes.legend(fontsize=7)


def _interval(axes: Any, plan: Plan) -> None:
    best = plan.faults.best
    intervals = np.geomspace(max(1.0, best.interval / 20), best.interval * 50, 80)
    curve = goodput_curve(intervals, plan.faults.cost, plan.faults.model, plan.request.gpus)
    axes.semilogx(intervals, [point.fraction for point in curve])
    axes.axvline(best.interval, linestyle="-", color="black", linewidth=1, label="best")
    axes.axvline(plan.faults.young_s, linestyle=":", color="tab:red", label="Young")
    axes.axvline(plan.faults.daly_s, linestyle="--", color="tab:orange", label="Daly")
    axes.set_xlabel("s of work between checkpoints")
    axes.set_ylabel("goodput")
    axes.legend(fontsize=7)


def _sensitivity(axes: Any, plan: Plan) -> None:
    factors = [factor for factor, _ in plan.faults.sensitivity]
    axes.semilogx(factors, [result.fraction for _, result in plan.faults.sensitivity], marker="o")
    axes.set_xticks(factors, [f"{factor:g}x" for factor in factors])
    axes.minorticks_off()
    axes.set_xlabel("failure rate, as a multiple of the assumed one")
    axes.set_ylabel("goodput at the best interval")
