"""The figure of docs/models.md: the longest sequence of each model, with memfine_fx and without, by memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memfine_fx.report.figure import blank_figure

__all__ = ["draw"]

_COLOURS = ("#b8c9d9", "#86a8c4", "#4f86ad", "#22648f", "#0b3d61")
"""By memory, more is darker."""
_TITLES = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA (NF4)"}
_BAND = 0.76  # of a model's row that its memories take


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A column a training, a row a model, a line a memory: an open circle without memfine_fx, a filled one with it.

    Args:
        rows: as `models_page.merged` gives them; those with nothing to draw are left out.
    """
    shown = [row for row in rows if "floor_bytes" not in row and "without" in row and _points(row)]
    models = list(dict.fromkeys(row["model"] for row in shown))
    trains = [train for train in _TITLES if any(row["train"] == train for row in shown)]
    if not shown:
        return
    figure, first = blank_figure((4.2 * len(trains) + 1.6, 0.62 * len(models) + 1.9), "drawing sequences by memory")
    first.remove()
    panels = figure.subplots(1, len(trains), sharex=True, sharey=True, squeeze=False)[0]
    for axes, train in zip(panels, trains, strict=True):
        for row in (row for row in shown if row["train"] == train):
            _draw_row(axes, row, models.index(row["model"]))
        _finish(axes, _TITLES[train], models)
    figure.legend(handles=_handles(shown[0]), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path)


def _points(row: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(place of the memory, tokens without, tokens with) where there are any."""
    ways = [row.get(way, {}) for way in ("with", "with_checkpoints")]
    pairs = ((row["without"][memory], max(way.get(memory, 0) for way in ways)) for memory in row["without"])
    return [(place, *pair) for place, pair in enumerate(pairs) if any(pair)]


def _draw_row(axes: Any, row: dict[str, Any], model: int) -> None:
    num = len(row["without"])
    for place, theirs, ours in _points(row):
        height, colour = model + _BAND * ((place + 0.5) / num - 0.5), _COLOURS[place % len(_COLOURS)]
        there = [one for one in (theirs, ours) if one]
        axes.plot(there, [height] * len(there), color=colour, linewidth=1.6, zorder=1)
        if theirs:
            axes.scatter(theirs, height, s=20, facecolor="white", edgecolor=colour, zorder=2)
        if ours:
            axes.scatter(ours, height, s=20, color=colour, zorder=3)


def _finish(axes: Any, title: str, models: Sequence[str]) -> None:
    axes.set_xscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("longest sequence, tokens", fontsize=9)
    axes.set_yticks(range(len(models)), models, fontsize=9)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    for edge in range(1, len(models)):
        axes.axhline(edge - 0.5, color="#e4e4e4", linewidth=0.7)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _handles(row: dict[str, Any]) -> list[Any]:
    from matplotlib.lines import Line2D

    memories = [
        Line2D([], [], color=_COLOURS[place % len(_COLOURS)], linewidth=2.5, label=f"{memory} GB")
        for place, memory in enumerate(row["without"])
    ]
    dot = {"linestyle": "", "marker": "o", "color": "#444444", "markersize": 5}
    return [
        *memories,
        Line2D([], [], **dot, label="with memfine_fx"),
        Line2D([], [], **dot, markerfacecolor="white", label="torch.compile, layers checkpointed"),
    ]
