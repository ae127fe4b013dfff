"""A blank matplotlib figure without pyplot's global state; the package is needed only where something is drawn."""

from __future__ import annotations

from typing import Any

from memfine_fx.errors import MissingPackage

__all__ = ["blank_figure"]


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
