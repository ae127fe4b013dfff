"""A study of factors as text, as JSON and as figures."""

from __future__ import annotations

import math
from typing import Any

from memfine_planner.training.sweep import FACTORS, PRODUCTIVE, Point, Study, Sweep

__all__ = ["draw_elasticities", "draw_range", "draw_shares", "draw_speed", "study_json", "study_text"]

_SHOWN_SHARES = 6
_PRODUCTIVE = "products, attention, head"
_COLOURS = {
    _PRODUCTIVE: "#c9dce4",
    "memory-bound kernels": "#7f8c93",
    "recomputation": "#e0a030",
    "waiting for the host": "#9467bd",
    "pipeline bubble": "#8c564b",
    "pipeline sends": "#c49c94",
    "exposed TP communication": "#2ca02c",
    "exposed CP communication": "#98df8a",
    "exposed EP communication": "#1f77b4",
    "FSDP gathers": "#17a2b8",
    "gradient reduction": "#5f9ea0",
    "weight gather": "#9edae5",
    "optimizer": "#bcbd22",
    "offload": "#dbdb8d",
    "failures": "#c2553a",
    "other": "#e4e8eb",
}
"""A loss has one colour in every figure, so that figures can be compared."""


def study_text(found: Study) -> str:
    """A table for each factor, where each bottleneck takes over, and the tornado as numbers."""
    parts = [_table(swept) for swept in found.sweeps]
    lines = ["useful speed over each factor's values, relative to the plan's"]
    for swept in sorted(found.sweeps, key=_width, reverse=True):
        low, high = swept.gain
        lines.append(f"  {swept.factor:22}{low:7.2f} to {high:5.2f}")
    parts.append("\n".join(lines))
    if found.elasticities:
        lines = ["elasticities: per cent of useful speed per per cent more, strategy kept"]
        lines += [f"  {entry.factor:22}{entry.value:+7.3f}" for entry in found.elasticities]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _width(swept: Sweep) -> float:
    low, high = swept.gain
    return math.log(high / low) if low > 0 else math.inf


def _table(swept: Sweep) -> str:
    lines = [
        f"{swept.factor} ({FACTORS[swept.factor]})",
        f"  {'value':>10}{'useful tokens/s/GPU':>21}{'MFU':>7}{'goodput':>9}  {'bottleneck':34}strategy",
    ]
    for point in swept.points:
        if point.best is None:
            lines.append(f"  {point.value:10,.6g}  no strategy that is valid fits")
            continue
        name, share = point.bottleneck
        lines.append(
            f"  {point.value:10,.6g}{point.speed:21,.0f}{point.best.step.utilisation:7.1%}"
            f"{point.best.goodput.fraction:9.1%}  {f'{name} {share:.0%}':34}{point.best.strategy.label()}"
        )
    taken = "; ".join(f"{name} from {value:,.6g}" for value, name in swept.takeovers)
    lines.append(f"  largest loss: {taken}" if taken else "  nothing fits")
    return "\n".join(lines)


def study_json(found: Study) -> dict[str, Any]:
    """The same as records."""
    return {
        "sweeps": [
            {
                "factor": swept.factor,
                "unit": FACTORS[swept.factor],
                "base": swept.base.value,
                "points": [_point(point) for point in swept.points],
                "bottlenecks": [{"from": value, "name": name} for value, name in swept.takeovers],
                "relative_speed": swept.gain,
            }
            for swept in found.sweeps
        ],
        "elasticities": {entry.factor: entry.value for entry in found.elasticities},
    }


def _point(point: Point) -> dict[str, Any]:
    if point.best is None:
        return {"value": point.value, "strategy": None}
    return {
        "value": point.value,
        "strategy": point.best.strategy.label(),
        "useful_tokens_per_s_per_gpu": point.speed,
        "utilisation": point.best.step.utilisation,
        "goodput": point.best.goodput.fraction,
        "shares": dict(point.shares),
    }


def draw_range(axes: Any, found: Study) -> None:
    """Tornado: how far each swept factor moves the useful speed, widest on top."""
    ordered = sorted(found.sweeps, key=_width)
    for row, swept in enumerate(ordered):
        low, high = swept.gain
        axes.barh(row, high - low, left=low, color="#2a7f9e")
        for value, align in ((low, "right"), (high, "left")):
            axes.text(value, row, f" {value:.2f} ", ha=align, va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(ordered)), [swept.factor for swept in ordered])
    low, high = min(s.gain[0] for s in ordered), max(s.gain[1] for s in ordered)
    room = 0.12 * (high - low) + 0.02
    axes.set_xlim(low - room, high + room)
    axes.set_xlabel("useful speed, relative to the plan's")


def draw_elasticities(axes: Any, found: Study) -> None:
    """Bars of the elasticities, largest on top."""
    shown = found.elasticities[::-1]
    colors = ["#2a7f9e" if entry.value >= 0 else "#c2553a" for entry in shown]
    axes.barh(range(len(shown)), [entry.value for entry in shown], color=colors)
    axes.axvline(0.0, color="black", linewidth=1)
    axes.set_yticks(range(len(shown)), [entry.factor for entry in shown])
    axes.set_xlabel("% of useful speed per % more, strategy kept")


def draw_speed(axes: Any, swept: Sweep) -> None:
    """Useful speed over a factor, with the strategy wherever it changes."""
    points = [point for point in swept.points if point.best]
    values = [point.value for point in points]
    axes.plot(values, [point.speed for point in points], marker="o", color="#2a7f9e")
    _log_axis(axes, swept, values)
    axes.set_ylabel("useful tokens/s/GPU")
    # Room above the line for the names of the strategies, each from where it begins to win.
    axes.set_ylim(0, 1.6 * max(point.speed for point in points))
    axes.margins(x=0.12)
    shown = ""
    for point in points:
        assert point.best is not None
        s = point.best.strategy
        sizes = {"TP": s.tp, "PP": s.pp, "EP": s.ep}
        label = " ".join([*(f"{name}{size}" for name, size in sizes.items() if size > 1), f"ZeRO{s.zero}"])
        if label != shown:
            axes.axvline(point.value, color="#9db4be", linestyle=":", linewidth=1)
            place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": "top"}
            axes.text(point.value, 0.98, label, fontsize=8, **place)
            shown = label


def draw_shares(axes: Any, swept: Sweep) -> None:
    """Where the wall-clock goes over a factor: productive work below, the largest losses above."""
    points = [point for point in swept.points if point.best]
    values = [point.value for point in points]
    tables = [dict(point.shares) for point in points]
    losses = {name for table in tables for name in table} - set(PRODUCTIVE)
    largest = sorted(losses, key=lambda name: -max(table.get(name, 0.0) for table in tables))[:_SHOWN_SHARES]
    rows = [[sum(table.get(name, 0.0) for name in PRODUCTIVE) for table in tables]]
    rows += [[table.get(name, 0.0) for table in tables] for name in largest]
    rows.append([1 - sum(column) for column in zip(*rows, strict=True)])
    names = [_PRODUCTIVE, *largest, "other"]
    axes.stackplot(values, rows, labels=names, colors=[_COLOURS[name] for name in names])
    _log_axis(axes, swept, values)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of the wall-clock")
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def _log_axis(axes: Any, swept: Sweep, values: list[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,.6g}" for value in values], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel(f"{swept.factor}, {FACTORS[swept.factor]}")
