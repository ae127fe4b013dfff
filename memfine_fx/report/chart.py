"""Charts as SVG text: lines, steps, areas, boxes and notes on two axes with units, and a legend.

One description gives the chart of a page, in the page's colours and at any width, and a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Literal

from memfine_fx.errors import ConfigError
from memfine_fx.report.style import SERIES, with_light_colours

__all__ = [
    "SERIES", "Axis", "Box", "Chart", "Line", "Mark", "Note", "areas", "bars", "chart_file", "columns", "level",
    "moment", "write_charts",
]  # fmt: skip

Point = tuple[float, float]
_TEXT, _CHARACTER, _ROW = 12, 7.1, 18  # px: height of text, width of a character, height of a row of text


@dataclass(frozen=True)
class Axis:
    """One axis of a chart: what it measures, its ends and its ticks.

    Args:
        label: the quantity and its unit, such as "live memory, MiB".
        low, high: the ends; None where the marks decide.
        is_log: whether equal lengths are equal ratios.
        ticks: (value, text); () for round values.
    """

    label: str
    low: float | None = None
    high: float | None = None
    is_log: bool = False
    ticks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Line:
    """Points that a line joins, that stand alone as dots or rings, or that surround an area.

    Args:
        points: (x, y); infinite values are the ends of an axis.
        name: in the legend; "" for none.
        colour: a name of `style`.
        form: "steps" holds each y until the next x.
    """

    points: Sequence[Point]
    name: str = ""
    colour: str = "accent"
    form: Literal["line", "steps", "area", "dots", "rings"] = "line"
    has_dots: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class Box:
    """A bar, or a stretch of an axis; infinite values are the ends of an axis."""

    left: float
    right: float
    bottom: float
    top: float
    name: str = ""
    colour: str = "accent"
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True)
class Note:
    """Text at a place: behind it, in its middle, or upright below it. Notes with `is_apart` move up off each other."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    is_upright: bool = False
    is_apart: bool = False


Mark = Line | Box | Note


@dataclass(frozen=True)
class Chart:
    """Marks on two axes, drawn in their order.

    Args:
        height: of the plot without texts around it, px at the width for which it is drawn.
    """

    x: Axis
    y: Axis
    marks: Sequence[Mark]
    height: int = 210

    def svg(self, width: int = 420) -> str:
        """Return the chart as an SVG element that scales with its place; colours are variables of `style.palette`."""
        boxes = [point for mark in self.marks for point in _corners(mark)]
        y = _ranged(self.y, [point[1] for point in boxes], room_below=self.y.is_log)
        left = 6 + _CHARACTER * max((len(text) for _, text in y.ticks), default=0)
        x = _ranged(self.x, [point[0] for point in boxes], most=int((width - left) / 60))
        right = width - 8 - _CHARACTER * len(x.ticks[-1][1] if x.ticks else "") / 2
        top = _ROW + 8 if y.label else 8
        to_x, to_y = _scale(x, left, right), _scale(y, top + self.height, top)
        parts = [_text(2, _TEXT, y.label)] if y.label else []
        for value, text in y.ticks:
            height = to_y(value)
            parts.append(_path([(left, height), (right, height)], "line"))
            parts.append(_text(left - 5, height + 4, text, "end"))
        bottom, ticks = self._x_ticks(x, to_x, top + self.height)
        parts += ticks
        note_places: list[tuple[float, float, float]] = []
        for mark in self.marks:
            parts.append(_note(mark, to_x, to_y, note_places) if isinstance(mark, Note) else _mark(mark, to_x, to_y))
        parts.append(_path([(left, top + self.height), (right, top + self.height)], "soft"))
        parts.append(_text((left + right) / 2, bottom + _ROW - 4, x.label, "middle"))
        bottom, legend = _legend(self.marks, bottom + _ROW + 4, width)
        height = bottom + 4
        return (
            f'<svg viewBox="0 0 {width} {height:.0f}" role="img" font-size="{_TEXT}" '
            f'aria-label="{escape(f"{y.label} over {x.label}")}">{"".join(parts + legend)}</svg>'
        )

    def _x_ticks(self, x: Axis, to_x: Callable[[float], float], bottom: float) -> tuple[float, list[str]]:
        """Return (the height below them, SVG): upright where they would cover each other."""
        places = [to_x(value) for value, _ in x.ticks]
        lengths = [_CHARACTER * max(map(len, text.split("\n"))) for _, text in x.ticks]
        need = [(a + b) / 2 + 4 for a, b in pairwise(lengths)]
        is_tight = any(b - a < least for (a, b), least in zip(pairwise(places), need, strict=True))
        parts = [_path([(place, bottom), (place, bottom + 4)], "soft") for place in places]
        for place, length, (_, text) in zip(places, lengths, x.ticks, strict=True):
            if is_tight:
                parts.append(_text(place + 4, bottom + 7, text, "end", turned=True))
            else:
                lines, inside = enumerate(text.split("\n")), max(place, length / 2)  # not beyond the left edge
                parts += [_text(inside, bottom + _ROW * (row + 1) - 2, line, "middle") for row, line in lines]
        rows = max((text.count("\n") + 1 for _, text in x.ticks), default=0)
        return bottom + (max(lengths) + 8 if is_tight else _ROW * rows + 2), parts


def chart_file(rows: Sequence[Sequence[tuple[str, Chart]]], width: int = 420) -> str:
    """Return an SVG document of charts with their titles, a list of charts a row, in light colours on white.

    Args:
        width: px of each chart.
    """
    parts, below = [], 0.0
    for row in rows:
        drawn = [(title, chart.svg(width)) for title, chart in row]
        heights = [float(svg.split('"', 2)[1].split()[3]) for _, svg in drawn]
        for place, ((title, svg), height) in enumerate(zip(drawn, heights, strict=True)):
            left = 12 + place * (width + 20)
            parts.append(f'<text x="{left}" y="{below + 22}" font-size="14" font-weight="bold">{escape(title)}</text>')
            parts.append(svg.replace("<svg", f'<svg x="{left}" y="{below + 32}" width="{width}" height="{height}"', 1))
        below += max(heights) + 44
    total = 4 + max(map(len, rows)) * (width + 20)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{below:.0f}" viewBox="0 0 {total} {below}"'
    text = f'{head} font-family="Helvetica,Arial,sans-serif"><rect width="{total}" height="{below}" fill="#ffffff"/>'
    return with_light_colours(f"{text}{''.join(parts)}</svg>\n")


def write_charts(path: str | Path, rows: Sequence[Sequence[tuple[str, Chart]]], width: int = 420) -> None:
    """Write `chart_file` to a file.

    Raises:
        ConfigError: the file's name does not end in ".svg".
    """
    if Path(path).suffix.lower() != ".svg":
        raise ConfigError(f"charts are SVG: name the file {Path(path).with_suffix('.svg')}, not {path}")
    Path(path).write_text(chart_file(rows, width), encoding="utf-8")


def level(y: float, name: str = "", colour: str = "bad") -> Line:
    """Return a dashed line across the chart at a height."""
    return Line(((-math.inf, y), (math.inf, y)), name, colour, is_dashed=True)


def moment(x: float, name: str = "", colour: str = "soft") -> Line:
    """Return a dashed line up the chart at a place."""
    return Line(((x, -math.inf), (x, math.inf)), name, colour, is_dashed=True)


def bars(rows: Sequence[tuple[str, float, str, str]], x: Axis) -> Chart:
    """Return horizontal bars, the first on top.

    Args:
        rows: (name, value, the text behind the bar, colour).
    """
    marks: list[Mark] = []
    for place, (_, value, text, colour) in enumerate(rows):
        left, right = sorted((-math.inf if x.is_log else 0.0, value))
        marks += [Box(left, right, -place - 0.36, -place + 0.36, colour=colour), Note(max(value, 0), -place, text)]
    if x.high is None:
        most = max(value for _, value, _, _ in rows)
        x = replace(x, high=most * (8 if x.is_log else 1.15 + 0.02 * max(len(text) for _, _, text, _ in rows)))
    names = [(-place, name) for place, (name, *_) in enumerate(rows)]
    return Chart(x, Axis("", 0.6 - len(rows), 0.6, ticks=names), marks, 16 + 24 * len(rows))


def columns(stacks: Sequence[Mapping[str, float]], colours: Mapping[str, str]) -> list[Mark]:
    """Return a column of boxes for each stack of values, at x = 0, 1, ...

    Args:
        stacks: name -> height.
        colours: name -> colour, in the order from the lowest box.
    """
    marks, below = list[Mark](), [0.0] * len(stacks)
    for name, colour in colours.items():
        for place, stack in enumerate(stacks):
            bottom, below[place] = below[place], below[place] + stack.get(name, 0.0)
            if below[place] > bottom:
                marks.append(Box(place - 0.4, place + 0.4, bottom, below[place], name, colour, tip=name))
    return marks


def areas(xs: Sequence[float], layers: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> list[Mark]:
    """Return layers stacked on each other over common x."""
    below, marks = [0.0] * len(xs), list[Mark]()
    for name, heights in layers.items():
        above = [low + height for low, height in zip(below, heights, strict=True)]
        edge = [*zip(xs, above, strict=True), *zip(reversed(xs), reversed(below), strict=True)]
        marks.append(Line(edge, name, colours[name], "area"))
        below = above
    return marks


def _corners(mark: Mark) -> list[Point]:
    if isinstance(mark, Line):
        return list(mark.points)
    return [(mark.left, mark.bottom), (mark.right, mark.top)] if isinstance(mark, Box) else []


def _ranged(axis: Axis, values: Sequence[float], most: int = 5, room_below: bool = True) -> Axis:
    """Return the axis with ends and ticks: those of the marks with room around them, from 0 where nothing is less."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not axis.is_log)] or [1.0]
    low, high = min(finite), max(finite)
    if axis.is_log:
        room = max(1.1, (high / low) ** 0.05)
        low, high = low / room, high * room
    else:
        low = low if room_below else min(0.0, low)
        room = 0.05 * (high - low) or 1.0
        low, high = low - (room if room_below or low < 0 else 0), high + room
    low, high = low if axis.low is None else axis.low, high if axis.high is None else axis.high
    ticks = axis.ticks or (_log_ticks if axis.is_log else _round_ticks)(low, high, max(2, most))
    return replace(axis, low=low, high=high, ticks=[tick for tick in ticks if low <= tick[0] <= high])


def _round_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= high - low)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(number * step, f"{number * step:,.{decimals}f}") for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [10.0**power * factor for power in powers for factor in factors if low <= 10.0**power * factor <= high]
        if len(ticks) <= most + 1:
            break
    return [(value, f"{value:,.10g}") for value in ticks]


def _scale(axis: Axis, begin: float, end: float) -> Callable[[float], float]:
    """Return the function from values to px; what lies beyond the ends of the axis is drawn at them."""
    first, last = axis.low or 0.0, axis.high or 0.0
    of = math.log if axis.is_log else float
    low, high = of(first), of(last)

    def place(value: float) -> float:
        return begin + (end - begin) * (of(min(max(value, first), last)) - low) / (high - low)

    return place


def _mark(mark: Line | Box, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    if isinstance(mark, Box):
        left, right, bottom, top = to_x(mark.left), to_x(mark.right), to_y(mark.bottom), to_y(mark.top)
        tip = f"<title>{escape(mark.tip)}</title>" if mark.tip else ""
        return (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
            f'fill="var(--{mark.colour})" fill-opacity="{mark.opacity:g}">{tip}</rect>'
        )
    points = [(to_x(x), to_y(y)) for x, y in mark.points]
    dots = ""
    if mark.has_dots or mark.form in ("dots", "rings"):
        ink = f'fill="var(--{"paper" if mark.form == "rings" else mark.colour})" stroke="var(--{mark.colour})"'
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" {ink}/>' for x, y in points)
    if mark.form == "steps":
        points = [each for a, b in pairwise(points) for each in (a, (b[0], a[1]))] + points[-1:]
    return (
        dots
        if mark.form in ("dots", "rings")
        else _path(points, mark.colour, 1.6, mark.form == "area", mark.is_dashed) + dots
    )


def _path(
    points: Sequence[Point], colour: str, width: float = 1.0, is_filled: bool = False, is_dashed: bool = False
) -> str:
    text = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    if is_filled:
        return f'<path d="M{text}Z" fill="var(--{colour})"/>'
    dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
    return f'<path d="M{text}" fill="none" stroke="var(--{colour})" stroke-width="{width:g}"{dashes}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", turned: bool = False, colour: str = "soft") -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="var(--{colour})" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _note(
    note: Note,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    note_places: list[tuple[float, float, float]],
) -> str:
    """Return the note's SVG; `note_places` has (left, right, height) of the notes that later ones move up from."""
    x, y = to_x(note.x), to_y(note.y)
    if note.is_upright:
        return _text(x + 13, y, note.text, "end", turned=True, colour="ink")
    if not note.is_apart:
        shift = {"start": 5, "middle": 0, "end": -5}[note.anchor]
        return _text(x + shift, y + 4, note.text, note.anchor, colour="ink")
    left, right, height = x + 8, x + 8 + _CHARACTER * len(note.text), y + 4
    while any(left < end and begin < right and abs(height - other) < _TEXT + 1 for begin, end, other in note_places):
        height -= 3
    note_places.append((left, right, height))
    back = _path([(x, y), (left - 1, height - 4)], "line") if height < y else ""
    return back + _text(left, height, note.text, colour="ink")


def _legend(marks: Sequence[Mark], top: float, width: float) -> tuple[float, list[str]]:
    """Return (the height below it, SVG): a sample and the name of each series, in as many rows as they need."""
    named: dict[str, Line | Box] = {}
    for mark in marks:
        if not isinstance(mark, Note) and mark.name:
            named.setdefault(mark.name, mark)
    parts, x, y = list[str](), 4.0, top
    for name, mark in named.items():
        length = 26 + _CHARACTER * len(name)
        if x > 4 and x + length > width:
            x, y = 4.0, y + _ROW
        if isinstance(mark, Line) and mark.form != "area":
            points = ((x, y + 5), (x + 16, y + 5))
            sample = replace(
                mark, points=((x + 8, y + 5),) if mark.form in ("dots", "rings") else points, has_dots=False
            )
            parts.append(_mark(sample, float, float))
        else:
            opacity = mark.opacity if isinstance(mark, Box) else 1.0
            sample_box = Box(x, x + 12, y + 11, y - 1, colour=mark.colour, opacity=opacity)
            parts.append(_mark(sample_box, float, float))
        parts.append(_text(x + 21, y + 9, name))
        x += length + 10
    return y + _ROW if named else top, parts
