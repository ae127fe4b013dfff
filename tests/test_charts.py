"""Charts: places of marks, ticks, legends, and files of their own."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from memfine_fx.errors import ConfigError
from memfine_fx.report.chart import Axis, Box, Chart, Line, Note, areas, bars, columns, level, write_charts


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def path_of(svg: str, colour: str) -> list[tuple[float, float]]:
    """Points of the first line of a colour."""
    path, *_ = re.findall(rf'<path d="M([^"]*)" fill="none" stroke="var\(--{colour}\)" stroke-width="1.6"', svg)
    return [(float(x), float(y)) for x, y in (point.split() for point in path.split("L"))]


def test_ticks_are_round_and_axes_have_units() -> None:
    shown = texts(Chart(Axis("time, ms", 0, 1000), Axis("memory, MiB"), [Line([(0, 0), (1000, 95)])]).svg())
    assert {"time, ms", "memory, MiB", "0", "20", "40", "60", "80", "1,000"} <= set(shown)


def test_a_logarithmic_axis_has_equal_lengths_for_equal_ratios() -> None:
    svg = Chart(Axis("x", is_log=True), Axis("y"), [Line([(1, 0), (10, 1), (100, 2)], colour="good")]).svg()
    (first, _), (second, _), (third, _) = path_of(svg, "good")
    assert math.isclose(second - first, third - second, abs_tol=0.2)
    assert {"1", "10", "100"} <= set(texts(svg))


def test_steps_hold_each_value_until_the_next() -> None:
    svg = Chart(Axis("x", 0, 2), Axis("y", 0, 4), [Line([(0, 1), (1, 3), (2, 3)], colour="good", form="steps")]).svg()
    points = path_of(svg, "good")
    assert points[0][1] == points[1][1] and points[1][0] == points[2][0] and points[2][1] < points[1][1]


def test_an_infinite_end_is_the_end_of_the_axis() -> None:
    marks = [Line([(0, 0), (10, 8)], colour="good"), level(5, "limit"), Box(2, 4, -math.inf, math.inf, "stretch")]
    svg = Chart(Axis("x", 0, 10), Axis("y", 0, 10), marks).svg()
    line, limit = path_of(svg, "good"), path_of(svg, "bad")
    assert limit[0][0] == line[0][0] and limit[1][0] == line[1][0]
    assert 'height="210.0"' in svg
    assert {"limit", "stretch"} <= set(texts(svg))


def test_a_name_is_in_the_legend_once() -> None:
    marks = columns([{"a": 1.0, "b": 2.0}, {"a": 2.0}], {"a": "series0", "b": "series1"})
    svg = Chart(Axis("rank"), Axis("ms"), marks).svg()
    assert texts(svg).count("a") == 1 and texts(svg).count("b") == 1
    heights = [float(height) for height in re.findall(r'height="([\d.]+)" fill="var\(--series0\)"', svg)[:2]]
    assert math.isclose(heights[1], 2 * heights[0], rel_tol=0.01)


def test_layers_stand_on_each_other() -> None:
    lower, upper = areas([0, 1], {"a": [1, 2], "b": [3, 1]}, {"a": "series0", "b": "series1"})
    assert isinstance(lower, Line) and isinstance(upper, Line)
    assert list(upper.points) == [(0, 4), (1, 3), (1, 2), (0, 1)]


def test_bars_leave_room_for_their_texts_and_names() -> None:
    svg = bars([("exposed communication", 3.0, "30%", "accent"), ("rest", -0.1, "-1%", "bad")], Axis("s")).svg()
    names = ElementTree.fromstring(svg)
    for element in names.iter("text"):
        length = 6 * len(element.text or "")
        x, anchor = float(element.get("x") or 0), element.get("text-anchor")
        left = x - {"start": 0, "middle": length / 2, "end": length}[anchor or "start"]
        assert left > -1 and left + length < 421, element.text
    assert 'width="-' not in svg


def test_notes_that_would_cover_each_other_move_apart() -> None:
    notes = [Note(1, 1, "first", is_apart=True), Note(1.01, 1, "second", is_apart=True)]
    svg = Chart(Axis("x", 0, 10), Axis("y", 0, 2), notes).svg()
    first, second = (float(re.findall(rf' y="([\d.]+)"[^>]*>{name}<', svg)[0]) for name in ("first", "second"))
    assert first - second >= 12


def test_long_ticks_stand_upright() -> None:
    ticks = [(place, f"a long name {place}") for place in range(8)]
    svg = Chart(Axis("x", ticks=ticks), Axis("y"), [Line([(0, 1), (7, 1)])]).svg()
    assert svg.count("rotate(-90") == 8


def test_a_file_needs_no_style(tmp_path: Path) -> None:
    chart = Chart(Axis("x"), Axis("y"), [Line([(0, 1), (1, 2)], "<b>")])
    write_charts(tmp_path / "charts.svg", [[("one & two", chart), ("three", chart)]])
    written = (tmp_path / "charts.svg").read_text(encoding="utf-8")
    assert "var(" not in written and 'fill="#ffffff"' in written
    shown = [element.text for element in ElementTree.fromstring(written).iter("{http://www.w3.org/2000/svg}text")]
    assert shown.count("<b>") == 2 and "one & two" in shown
    with pytest.raises(ConfigError, match=r"charts are SVG: name the file \S*charts.svg"):
        write_charts(tmp_path / "charts.png", [[("one", chart)]])
