"""Draw figures without pyplot's global state; matplotlib is needed only where something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memfine_fx.errors import MissingPackage
from memfine_fx.plan.front import FrontPoint, MeasuredPoint

__all__ = ["blank_figure", "draw_front"]


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
