"""A report as HTML: a fragment that a notebook shows, and one file that needs nothing beside it.

Regions and heads with status and reason, what is alive at the predicted peak, and the measured step over time where
there is one. Styles are inline and drawings are SVG, so that no script runs and nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from memfine_fx.memory.timeline import Timeline

if TYPE_CHECKING:
    from memfine_fx.records import Where
    from memfine_fx.report.reports import HeadReport, RegionReport, Report, StepReport

__all__ = ["fragment", "page"]

MIB = 2**20
_WIDTH, _HEIGHT = 800, 200
_MAX_POINTS = 2000
_COLOURS = {"forward": "#7aa6d8", "backward": "#d8a57a"}
_STYLE = """
.memfine{font:14px/1.45 system-ui,sans-serif;color:#222;background:#fff;max-width:60rem;padding:.5rem}
.memfine h3{font-size:1rem;margin:1rem 0 .3rem}
.memfine .wide{overflow-x:auto}
.memfine table{border-collapse:collapse;width:100%}
.memfine th,.memfine td{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0;border-bottom:1px solid #e3e3e3}
.memfine td{overflow-wrap:break-word}
@media(max-width:40rem){.memfine td{overflow-wrap:anywhere}}
.memfine .number{text-align:right;white-space:nowrap}
.memfine .chunked{color:#1a6b2f;white-space:nowrap}
.memfine .refused{color:#a32020;white-space:nowrap}
.memfine .bar{background:#7aa6d8;height:.6rem;min-width:1px}
.memfine svg{width:100%;height:auto}
"""


def page(report: Report) -> str:
    """Return the report as a whole HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>memfine_fx report</title></head>'
        f"<body>{fragment(report)}</body></html>\n"
    )


def fragment(report: Report) -> str:
    """Return the report as HTML for the body of a page; several may stand on one page."""
    parts = [_headline(report)]
    if report.regions or report.heads:
        parts.append(_layers([*report.layers, *report.heads]))
    if len(report.layers) < len(report.regions):
        parts.append(f"<p>{escape(report.others)}</p>")
    if report.step is not None:
        parts.append(_step(report.step))
    if report.timeline is not None and report.timeline.times_us:
        parts.append(_timeline(report.timeline))
    if report.notes:
        parts.append("<h3>Notes</h3><ul>" + "".join(f"<li>{escape(note)}</li>" for note in report.notes) + "</ul>")
    return f'<div class="memfine"><style>{_STYLE}</style>{"".join(parts)}</div>'


def _headline(report: Report) -> str:
    if not report.has_run:
        return (
            "<p><strong>memfine_fx</strong>: nothing has run yet; regions are found at the first call of the model</p>"
        )
    line = report.counted
    for what, num_bytes in (("predicted", report.predicted_peak_bytes), ("measured", report.measured_peak_bytes)):
        if num_bytes is not None:
            line += f", {_mib(num_bytes)} MiB {what}"
    return f"<p><strong>memfine_fx</strong>: {line}</p>"


def _layers(layers: Sequence[RegionReport | HeadReport]) -> str:
    return "<h3>Layers</h3>" + _table(
        ("status", "where", "how or why not", "imbalance of routing"), (_cells(layer) for layer in layers)
    )


def _cells(one: RegionReport | HeadReport) -> tuple[str, ...]:
    why = [_ran(one), one.reason if one.plan is None else one.plan.reason, f"hint: {one.hint}" if one.hint else ""]
    return (
        f'<td class="{one.status}">{one.status}</td>',
        f'<td title="{escape(str(one.where))}">{_place(one.where)}</td>',
        f"<td>{'<br>'.join(escape(text) for text in why if text)}</td>",
        _cell(str(getattr(one, "imbalance", None) or "")),
    )


def _place(where: Where) -> str:
    """The module and FILE:LINE without its folder."""
    return "<br>".join(escape(part) for part in (where.module, Path(where.source).name) if part)


def _ran(one: RegionReport | HeadReport) -> str:
    plan = one.plan
    if plan is None:
        return ""
    rows = getattr(plan, "rows_per_chunk", None)
    size = f"{plan.tokens_per_chunk} tokens" if plan.tokens_per_chunk else f"{rows} rows"
    chunks = f", {one.num_chunks} chunks" if one.num_chunks else ""
    return f"{size} a chunk{chunks}, {_mib(plan.predicted_bytes)} MiB predicted"


def _step(step: StepReport) -> str:
    terms = sorted((term for term in (*step.static, *step.peak.terms) if term[1] > 0), key=lambda term: -term[1])
    largest = terms[0][1] if terms else 1
    rows = (
        (
            _cell(name),
            f'<td class="number">{_mib(num_bytes)} MiB</td>',
            f'<td style="width:40%"><div class="bar" style="width:{100 * num_bytes / largest:.1f}%"></div></td>',
        )
        for name, num_bytes in terms
    )
    title = f"<h3>Alive at the predicted peak of the step, in its {escape(step.peak.where)}</h3>"
    return title + _table(("what", "bytes", ""), rows) + (f"<p>{escape(step.decision)}</p>" if step.decision else "")


def _timeline(timeline: Timeline) -> str:
    """Live bytes over the measured step as an SVG, a step line, with the regions' stretches behind it."""
    last, most = max(timeline.times_us[-1], 1e-9), max(1, timeline.peak_bytes())
    stretches = "".join(
        f'<rect x="{_WIDTH * span.begin_us / last:.1f}" y="0" height="{_HEIGHT}" '
        f'width="{_WIDTH * (span.end_us - span.begin_us) / last:.1f}" fill-opacity="0.3" '
        f'fill="{_COLOURS.get(span.name.partition(" ")[0], "#888888")}"><title>{escape(span.name)}</title></rect>'
        for span in timeline.spans
    )
    drawn = [(_WIDTH * time / last, _HEIGHT * (1 - max(0, live) / most)) for time, live in _highest(timeline)]
    corners = [(after[0], before[1]) for before, after in pairwise(drawn)]
    steps = [point for both in zip(drawn, [*corners, drawn[-1]], strict=True) for point in both]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in steps)
    return (
        f"<h3>The measured step: at most {_mib(most)} MiB beyond its start, {last / 1e3:.1f} ms while traced</h3>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="live memory over the step">{stretches}'
        f'<polyline points="{points}" fill="none" stroke="#222222" stroke-width="1.2"/></svg>'
    )


def _highest(timeline: Timeline) -> list[tuple[float, int]]:
    """(time, live bytes), of long steps the highest of each few events, so that the peak stays."""
    events = list(zip(timeline.times_us, timeline.live_bytes, strict=True))
    few = max(1, -(-len(events) // _MAX_POINTS))
    return [max(events[at : at + few], key=lambda event: event[1]) for at in range(0, len(events), few)]


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f}"
