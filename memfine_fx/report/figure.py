"""Draw figures without pyplot's global state; matplotlib is needed only where something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memfine_fx.errors import MissingPackage
from memfine_fx.memory.timeline import Timeline
from memfine_fx.plan.front import FrontPoint, MeasuredPoint

__all__ = ["blank_figure", "draw_front", "draw_timeline"]


def blank_figure(size: tuple[float, float], purpose: str, *, dpi: int = 150) -> tuple[Any, Any]:
    """(figure, its only axes).

    Args:
        size: width and height in inches.
        purpose: what cannot be done without matplotlib, for the error.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage("matplotlib", "bench", purpose) from error
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


MIB = 2**20


def draw_front(front: Sequence[FrontPoint], measured: Sequence[MeasuredPoint], path: str | Path) -> None:
    """Write the picture; the file name's ending chooses the format.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    figure, axes = blank_figure((8, 5), "drawing time against bytes")
    peaks, seconds = [point.peak_bytes / MIB for point in front], [point.seconds for point in front]
    axes.plot(peaks, seconds, "o-", color="#0a7d5a", label="memfine, predicted")
    for point, peak in zip(front, peaks, strict=True):
        axes.annotate(f"R={point.rows}, {point.policy}", (peak, point.seconds), fontsize=6, rotation=30)
    if measured:
        axes.plot(
            [peer.peak_bytes / MIB for peer in measured],
            [peer.seconds for peer in measured],
            "s",
            color="#3b5b8c",
            label="measured",
        )
    for peer in measured:
        axes.annotate(peer.name, (peer.peak_bytes / MIB, peer.seconds), fontsize=6)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("peak beyond parameters and gradients, MiB")
    axes.set_ylabel("forward and backward, s")
    axes.grid(color="#e3e3e3", linewidth=0.8)
    axes.legend(frameon=False)
    figure.savefig(path)


MIB = 2**20
_COLOURS = {"forward": "#3f7cac", "backward": "#d9822b"}
_MEASURED, _PREDICTED = "#22313f", "#b3261e"
_MAX_LABELS = 12


def draw_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write the picture; the file name's ending chooses the format.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    figure, axes = blank_figure((10, 5), "drawing the memory of a step")
    _draw_spans(axes, timeline)
    _draw_measured(axes, timeline)
    _draw_predicted(axes, timeline)
    _decorate(axes, timeline)
    figure.savefig(path)


def _draw_spans(axes: Any, timeline: Timeline) -> None:
    named: set[str] = set()
    for span in timeline.spans:
        direction, _, where = span.name.partition(" ")
        label = None if direction in named else f"chunked region, {direction}"
        named.add(direction)
        begin, end = span.begin_us / 1e3, span.end_us / 1e3
        axes.axvspan(begin, end, color=_COLOURS.get(direction, "#888888"), alpha=0.18, linewidth=0, label=label)
        if len(timeline.spans) <= _MAX_LABELS:
            axes.text(
                (begin + end) / 2, 0.01, where, rotation=90, ha="center", va="bottom", fontsize=7,
                color="#333333", transform=axes.get_xaxis_transform(),
            )  # fmt: skip


def _draw_measured(axes: Any, timeline: Timeline) -> None:
    times = [time / 1e3 for time in timeline.times_us]
    live = [num_bytes / MIB for num_bytes in timeline.live_bytes]
    label = f"measured, peak {timeline.peak_bytes() / MIB:.1f} MiB"
    axes.plot(times, live, drawstyle="steps-post", color=_MEASURED, linewidth=1.1, label=label, zorder=3)


def _draw_predicted(axes: Any, timeline: Timeline) -> None:
    spans = {span.name: span for span in timeline.spans}
    named = False
    for prediction in timeline.predictions:
        mib = prediction.peak_bytes / MIB
        if prediction.span is None:
            label = f"predicted for the step, {mib:.1f} MiB"
            axes.axhline(mib, color=_PREDICTED, linewidth=1.0, linestyle=(0, (6, 3)), label=label, zorder=4)
        elif prediction.span in spans:
            span = spans[prediction.span]
            once = {} if named else {"label": "predicted for a region"}
            named = True
            axes.hlines(mib, span.begin_us / 1e3, span.end_us / 1e3, color=_PREDICTED, linewidth=1.6, **once)


def _decorate(axes: Any, timeline: Timeline) -> None:
    axes.set_xlim(0, max((*(time / 1e3 for time in timeline.times_us), 1e-3)))
    axes.set_ylim(bottom=min(0, *(num_bytes / MIB for num_bytes in timeline.live_bytes)) if timeline.live_bytes else 0)
    axes.set_xlabel("time in the step (ms, while traced)")
    axes.set_ylabel("live memory beyond the start of the step (MiB)")
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8)
