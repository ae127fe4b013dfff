"""A region's graph as a picture: plain SVG, top to bottom, coloured by what each operation does for the experts."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Literal

__all__ = ["PictureNode", "RegionGraph", "Role", "region_svg"]

Role = Literal["input", "router", "dispatch", "experts", "combine"]

_COLOURS: dict[Role, str] = {
    "input": "#e4e4e7",
    "router": "#c7b9f5",
    "dispatch": "#a9d3f5",
    "experts": "#f7c98b",
    "combine": "#aee3b5",
}
_BOX_WIDTH, _BOX_HEIGHT = 196, 34
_COLUMN, _ROW = _BOX_WIDTH + 18, _BOX_HEIGHT + 26
_MARGIN, _HEAD = 20, 76
_SWEEPS = 4


@dataclass(frozen=True)
class PictureNode:
    """One operation: its name in the graph, shape and dtype in words, and what it does."""

    name: str
    shape: str
    role: Role


@dataclass(frozen=True)
class RegionGraph:
    """A region with its router.

    Args:
        nodes: in graph order.
        edges: (from, to) as places in `nodes`.
    """

    nodes: tuple[PictureNode, ...]
    edges: tuple[tuple[int, int], ...]


def region_svg(graph: RegionGraph, title: str) -> str:
    """The picture as an SVG document."""
    rows = _ordered_rows(graph)
    columns = max(map(len, rows), default=1)
    width = max(2 * _MARGIN + columns * _COLUMN, 720)
    height = _HEAD + len(rows) * _ROW + _MARGIN
    places = _places(rows, width)
    drawn = [_edge(places[source], places[target]) for source, target in graph.edges]
    drawn += [_box(node, places[number]) for number, node in enumerate(graph.nodes)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<text x="{_MARGIN}" y="28" font-size="15" font-weight="bold">{escape(title)}</text>',
            *_legend(),
            *drawn,
            "</svg>",
            "",
        ]
    )


def _ordered_rows(graph: RegionGraph) -> list[list[int]]:
    """Nodes by depth, inputs just above their first reader; within a row by the mean place of their neighbours."""
    count = len(graph.nodes)
    sources: list[list[int]] = [[] for _ in range(count)]
    targets: list[list[int]] = [[] for _ in range(count)]
    for source, target in graph.edges:
        sources[target].append(source)
        targets[source].append(target)
    depth = [0] * count
    for number in range(count):
        depth[number] = max((depth[source] + 1 for source in sources[number]), default=0)
    for number in reversed(range(count)):
        if not sources[number] and targets[number]:
            depth[number] = max(0, min(depth[target] for target in targets[number]) - 1)
    rows: list[list[int]] = [[] for _ in range(max(depth, default=0) + 1)]
    for number in range(count):
        rows[depth[number]].append(number)
    for _ in range(_SWEEPS):
        for neighbours in (sources, targets):
            place = {number: index - len(row) / 2 for row in rows for index, number in enumerate(row)}
            for row in rows:
                row.sort(key=lambda number: _mean([place[other] for other in neighbours[number]], place[number]))
    return rows


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _places(rows: list[list[int]], width: int) -> dict[int, tuple[float, float]]:
    """Centre of each node's box."""
    return {
        number: (width / 2 + (index - (len(row) - 1) / 2) * _COLUMN, _HEAD + level * _ROW + _BOX_HEIGHT / 2)
        for level, row in enumerate(rows)
        for index, number in enumerate(row)
    }


def _legend() -> list[str]:
    drawn = []
    for index, (role, colour) in enumerate(_COLOURS.items()):
        x = _MARGIN + index * 110
        drawn.append(f'<rect x="{x}" y="42" width="16" height="16" rx="3" fill="{colour}" stroke="#71717a"/>')
        drawn.append(f'<text x="{x + 22}" y="55" font-size="12">{role}</text>')
    return drawn


def _box(node: PictureNode, centre: tuple[float, float]) -> str:
    x, y = centre[0] - _BOX_WIDTH / 2, centre[1] - _BOX_HEIGHT / 2
    return (
        f'<g><rect x="{x:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="5" '
        f'fill="{_COLOURS[node.role]}" stroke="#71717a"/>'
        f'<text x="{centre[0]:.0f}" y="{y + 15:.0f}" font-size="11" text-anchor="middle">'
        f"{escape(_short(node.name))}</text>"
        f'<text x="{centre[0]:.0f}" y="{y + 28:.0f}" font-size="9" fill="#3f3f46" text-anchor="middle">'
        f"{escape(_short(node.shape))}</text></g>"
    )


def _short(text: str, limit: int = 30) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-limit // 2 :]}"


def _edge(source: tuple[float, float], target: tuple[float, float]) -> str:
    x1, y1 = source[0], source[1] + _BOX_HEIGHT / 2
    x2, y2 = target[0], target[1] - _BOX_HEIGHT / 2
    bend = max(12.0, (y2 - y1) / 2)
    path = f"M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} {x2:.0f},{y2:.0f}"
    return f'<path d="{path}" fill="none" stroke="#a1a1aa" stroke-width="1.1"/>'
