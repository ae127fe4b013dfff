"""A study of factors as text, as JSON and as figures."""

from __future__ import annotations

import math
from typing import Any

from memfine_fx.report.chart import SERIES, Axis, Box, Chart, Line, Mark, Note, areas, bars, moment
from memfine_planner.training.sweep import FACTORS, PRODUCTIVE, Point, Study, Sweep

__all__ = ["elasticity_chart", "range_chart", "shares_chart", "speed_chart", "study_json", "study_text"]

_SHOWN_SHARES = 6
_PRODUCTIVE = "products, attention, head"
_LOSSES = (
    "memory-bound kernels", "recomputation", "waiting for the host", "pipeline bubble", "pipeline sends",
    "exposed TP communication", "exposed CP communication", "exposed EP communication", "FSDP gathers",
    "gradient reduction", "weight gather", "optimizer", "offload", "failures", "other",
)  # fmt: skip
_COLOURS = dict(zip((_PRODUCTIVE, *_LOSSES), SERIES, strict=True))
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
    losses = "; ".join(f"{name} from {value:,.6g}" for value, name in swept.takeovers)
    lines.append(f"  largest loss: {losses}" if losses else "  nothing fits")
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


def range_chart(found: Study) -> Chart:
    """Return how far each swept factor moves the useful speed, widest on top."""
    marks: list[Mark] = [moment(1.0, "the plan", "ink")]
    ordered = sorted(found.sweeps, key=_width, reverse=True)
    for place, swept in enumerate(ordered):
        low, high = swept.gain
        marks.append(Box(low, high, -place - 0.36, -place + 0.36))
        marks += [Note(low, -place, f"{low:.2f}", "end"), Note(high, -place, f"{high:.2f}")]
    low, high = min(s.gain[0] for s in ordered), max(s.gain[1] for s in ordered)
    room = 0.2 * (high - low) + 0.02
    names = [(-place, swept.factor) for place, swept in enumerate(ordered)]
    x = Axis("useful speed, relative to the plan's", low - room, high + room)
    return Chart(x, Axis("", 0.6 - len(ordered), 0.6, ticks=names), marks, 16 + 24 * len(ordered))


def elasticity_chart(found: Study) -> Chart:
    """Return bars of the elasticities, largest on top."""
    values = [entry.value for entry in found.elasticities]
    rows = [
        (entry.factor, entry.value, f"{entry.value:+.2f}", "accent" if entry.value >= 0 else "bad")
        for entry in found.elasticities
    ]
    return bars(rows, Axis("% of useful speed per % more, strategy kept", min(0.0, 1.2 * min(values))))


def speed_chart(swept: Sweep) -> Chart:
    """Return useful speed over a factor, with the strategy wherever it changes."""
    points = [point for point in swept.points if point.best]
    # Room above the line for the names of the strategies, each from where it begins to win.
    most = 1.6 * max(point.speed for point in points)
    marks: list[Mark] = [Line([(point.value, point.speed) for point in points], has_dots=True)]
    shown = ""
    for point in points:
        assert point.best is not None
        s = point.best.strategy
        sizes = {"TP": s.tp, "PP": s.pp, "EP": s.ep}
        label = " ".join([*(f"{name}{size}" for name, size in sizes.items() if size > 1), f"ZeRO{s.zero}"])
        if label != shown:
            marks += [moment(point.value, colour="line"), Note(point.value, most, label, is_upright=True)]
            shown = label
    return Chart(_log_axis(swept), Axis("useful tokens/s/GPU", 0, most), marks)


def shares_chart(swept: Sweep) -> Chart:
    """Return where the wall-clock goes over a factor: productive work below, the largest losses above."""
    points = [point for point in swept.points if point.best]
    tables = [dict(point.shares) for point in points]
    losses = {name for table in tables for name in table} - set(PRODUCTIVE)
    largest = sorted(losses, key=lambda name: -max(table.get(name, 0.0) for table in tables))[:_SHOWN_SHARES]
    layers = {_PRODUCTIVE: [100 * sum(table.get(name, 0.0) for name in PRODUCTIVE) for table in tables]}
    layers |= {name: [100 * table.get(name, 0.0) for table in tables] for name in largest}
    layers["other"] = [100 - sum(column) for column in zip(*layers.values(), strict=True)]
    marks = areas([point.value for point in points], layers, _COLOURS)
    return Chart(_log_axis(swept), Axis("% of the wall-clock", 0, 100), marks)


def _log_axis(swept: Sweep) -> Axis:
    values = [(point.value, f"{point.value:,.6g}") for point in swept.points if point.best]
    return Axis(f"{swept.factor}, {FACTORS[swept.factor]}", is_log=True, ticks=values)
