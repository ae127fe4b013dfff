"""The figure of docs/models.md: the longest sequence of each model, with memfine_fx and without, by memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memfine_fx.report.chart import Axis, Chart, Line, Mark, write_charts

__all__ = ["draw"]

_COLOURS = ("series2", "series1", "series0", "series13", "ink")
"""By memory, more is darker."""
_TITLES = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA (NF4)"}
_BAND = 0.76  # of a model's row that its memories take


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A column a training, a row a model, a line a memory: a ring without memfine_fx, a dot with it.

    Args:
        rows: as `models_page.merged` gives them; those with nothing to draw are left out.
    """
    shown = [row for row in rows if "floor_bytes" not in row and "without" in row and _points(row)]
    models = list(dict.fromkeys(row["model"] for row in shown))
    by_train = {train: [row for row in shown if row["train"] == train] for train in _TITLES}
    charts = [(_TITLES[train], _chart(own, models, shown)) for train, own in by_train.items() if own]
    if charts:
        write_charts(path, [charts])


def _points(row: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(place of the memory, tokens without, tokens with) where there are any."""
    ways = [row.get(way, {}) for way in ("with", "with_checkpoints")]
    pairs = ((row["without"][memory], max(way.get(memory, 0) for way in ways)) for memory in row["without"])
    return [(place, *pair) for place, pair in enumerate(pairs) if any(pair)]


def _chart(rows: Sequence[dict[str, Any]], models: Sequence[str], shown: Sequence[dict[str, Any]]) -> Chart:
    lines: list[Mark] = []
    ends: list[Mark] = []
    for row in rows:
        memories = list(row["without"])
        for place, without, ours in _points(row):
            height = -models.index(row["model"]) - _BAND * ((place + 0.5) / len(memories) - 0.5)
            colour = _COLOURS[place % len(_COLOURS)]
            lines.append(
                Line([(tokens, height) for tokens in (without, ours) if tokens], f"{memories[place]} GB", colour)
            )
            for tokens, name, form in (
                (without, "torch.compile, layers checkpointed", "rings"),
                (ours, "with memfine_fx", "dots"),
            ):
                ends += [Line([(tokens, height)], name, colour, form)] if tokens else []  # type: ignore[arg-type]
    lengths = [tokens for row in shown for _, *both in _points(row) for tokens in both if tokens]
    x = Axis("longest sequence, tokens", min(lengths) / 1.3, max(lengths) * 1.3, is_log=True)
    names = [(-place, model) for place, model in enumerate(models)]
    y = Axis("", 0.5 - len(models), 0.5, ticks=names)
    lines.sort(key=lambda line: int(line.name.split()[0]) if isinstance(line, Line) else 0)
    return Chart(x, y, [*lines, *ends], 44 * len(models))
