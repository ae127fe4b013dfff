"""Reports of a model: as text, JSON and pictures, and as HTML: a fragment for a notebook, and a file of its own.

HTML shows regions and heads with status and reason, what is alive at the predicted peak, and the measured step over
time where there is one. Styles are inline and drawings are SVG, so that no script runs and nothing is loaded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfine_fx.errors import MemfineError
from memfine_fx.memory.timeline import Timeline
from memfine_fx.records import Where
from memfine_fx.report.entries import HeadReport, RegionReport, StepReport
from memfine_fx.report.picture import region_svg
from memfine_fx.report.style import palette
from memfine_fx.units import readable_bytes

if TYPE_CHECKING:  # sympy would be most of the package's import time
    import sympy

__all__ = ["Report", "by_reason", "chunked_in_words", "first_step_line", "fragment", "page", "unchunked_layers"]


@dataclass(frozen=True)
class Report:
    """All regions of a model.

    Args:
        regions: in the order in which the graphs were compiled.
        num_graphs: graphs that Dynamo captured (bodies of higher-order ops not counted).
        predicted_bytes: largest predicted working set of one region; None before a plan exists.
        measured_bytes: measured peak of the step beyond what was alive before it, or None.
        timeline: memory over the measured step, or None.
        step: predicted memory of the whole step, or None before one was compiled.
        notes: what was switched on the model or in Dynamo so that the experts reach a graph.
        heads: heads of a large vocabulary, chunked or refused.
        has_run: False before the model's first call: nothing is known then.
        comparison_seconds: that comparing chunked layers with the model's own code took.
        seconds: of each pass, and of other stages of the compiler, so far.
    """

    regions: tuple[RegionReport, ...]
    num_graphs: int
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    timeline: Timeline | None = None
    step: StepReport | None = None
    notes: tuple[str, ...] = ()
    heads: tuple[HeadReport, ...] = ()
    has_run: bool = True
    comparison_seconds: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak of the step on this device, what was there before it included."""
        return None if self.step is None else self.step.predicted_peak_bytes

    @property
    def measured_peak_bytes(self) -> int | None:
        """Measured peak of the step, what was there before it included; None if nothing was measured."""
        if self.measured_bytes is None or self.step is None:
            return None
        return self.step.static_bytes + self.measured_bytes

    @property
    def peak_expr(self) -> sympy.Expr | None:
        """The step's peak beyond what is there before it, in the sizes that vary (batch, sequence).

        R is that of the latest plans. `peak_expr.subs({"s27": 4096})` needs no compilation.
        """
        return None if self.step is None else self.step.expression()

    @property
    def num_chunked(self) -> int:
        return sum(region.status == "chunked" for region in self.regions)

    @property
    def layers(self) -> list[RegionReport]:
        """Regions, without choices that meet no experts (an auxiliary loss's) where some layer was chunked."""
        if not self.num_chunked:
            return list(self.regions)
        return [region for region in self.regions if region.has_experts]

    @property
    def counted(self) -> str:
        """How many layers were chunked, in words."""
        return f"{self.num_chunked} of {len(self.layers)} regions chunked in {self.num_graphs} graph(s)"

    @property
    def others(self) -> str:
        """How many choices are no layers, in words."""
        return f"{len(self.regions) - len(self.layers)} more top-k or arg-max meet no experts (an auxiliary loss, say)"

    def __str__(self) -> str:
        if not self.has_run:
            lines = ["memfine_fx: nothing has run yet; regions are found at the first call of the model"]
            return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
        lines = [f"memfine_fx: {self.counted}", *self._comparison(), *(f"  {region}" for region in self.layers)]
        if len(self.layers) < len(self.regions):
            lines.append(f"  {self.others}")
        lines.extend(f"  {head}" for head in self.heads)
        lines.extend(f"  note: {note}" for note in self.notes)
        if not self.regions:
            lines.append("  no routing decision (top-k, arg-max) with experts behind it was found")
        if self.predicted_bytes is not None:
            lines.append(f"  largest predicted region working set: {readable_bytes(self.predicted_bytes)}")
        if self.step is not None:
            lines += self.step.lines()
        if self.measured_peak_bytes is not None and self.predicted_peak_bytes is not None:
            error = self.predicted_peak_bytes / self.measured_peak_bytes - 1
            measured = readable_bytes(self.measured_peak_bytes)
            lines.append(f"  measured peak of the step: {measured}; prediction off by {error:+.1%}")
        if self.measured_bytes is not None:
            lines.append(f"  measured peak of the step beyond its start: {readable_bytes(self.measured_bytes)}")
        return "\n".join(lines)

    def _comparison(self) -> list[str]:
        """Say which chunked layers were not compared with the model's own code, and what comparing the others took."""
        reasons: dict[str, list[str]] = {}
        for region in self.regions:
            if region.not_compared_with_code:
                reasons.setdefault(region.not_compared_with_code, []).append(region.where.module or str(region.where))
        lines = [f"  not compared with your code: {', '.join(names)} ({reason})" for reason, names in reasons.items()]
        if self.comparison_seconds:
            lines.append(f"  layers compared with your code, run eagerly, in {self.comparison_seconds:.1f} s")
        return lines

    def picture(self, number: int = 0) -> str:
        """SVG of the graph of one chunked region (the `number`-th), as `explain` saw it.

        Raises:
            MemfineError: there is no such region, or the report is not from `explain`.
        """
        drawn = [region for region in self.regions if region.graph is not None]
        if not 0 <= number < len(drawn):
            raise MemfineError(f"there is no picture {number}: {len(drawn)} regions of this report have one")
        region = drawn[number]
        assert region.graph is not None
        return region_svg(region.graph, f"{region.where.module or _file_name(region.where)}, {region.family}")

    def to_json(self) -> str:
        """The report as a JSON document, without the timeline."""
        fields = dataclasses.asdict(dataclasses.replace(self, timeline=None, step=None))
        del fields["timeline"], fields["step"]
        fields["predicted_peak_bytes"] = self.predicted_peak_bytes
        fields["measured_peak_bytes"] = self.measured_peak_bytes
        if self.step is not None:
            fields["static_terms"] = dict(self.step.static)
            fields["peak_terms"] = [list(term) for term in self.step.peak.terms]
            fields["decision"] = self.step.decision
            fields["budget"] = self.step.budget
        return json.dumps(fields, indent=2, default=_jsonable)

    def _repr_html_(self) -> str:
        """How a notebook shows it."""
        return fragment(self)

    def to_html(self, path: str | Path) -> None:
        """Write one HTML file that needs nothing beside it.

        Args:
            path: of the file.
        """
        Path(path).write_text(page(self), encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draw the memory over the measured step, the chunked regions marked, what was predicted beside it.

        Args:
            path: of the picture; its ending chooses the format (png, svg, pdf).

        Raises:
            MemfineError: nothing was measured.
            MissingPackage: matplotlib is not installed.
        """
        if self.timeline is None:
            raise MemfineError(
                "this report holds no measured step to draw: memfine_fx.explain(model, ..., measure=True) makes one"
            )
        from memfine_fx.report.figure import draw_timeline

        draw_timeline(self.timeline, path)


def _file_name(where: Where) -> str:
    """FILE:LINE without its folder."""
    return Path(where.source).name or "MoE region"


def _jsonable(value: Any) -> str:
    return str(value)


_WIDTH, _HEIGHT = 800, 200
_MAX_POINTS = 2000
_STYLE = (
    palette(".memfine")
    + """
.memfine{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;padding:.5rem}
.memfine h3{font-size:1rem;margin:1rem 0 .3rem}
.memfine .wide{overflow-x:auto}
.memfine table{border-collapse:collapse;width:100%}
.memfine th,.memfine td{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0}
.memfine th,.memfine td{border-bottom:1px solid var(--line)}
.memfine td{overflow-wrap:break-word}
@media(max-width:40rem){.memfine td{overflow-wrap:anywhere}}
.memfine .number{text-align:right;white-space:nowrap}
.memfine .chunked{color:var(--good);white-space:nowrap}
.memfine .refused{color:var(--bad);white-space:nowrap}
.memfine .bar{background:var(--forward);height:.6rem;min-width:1px}
.memfine svg{display:block;width:100%;height:12rem;border:solid var(--line);border-width:1px 0}
.memfine .axis,.memfine .legend{display:flex;justify-content:space-between;font-size:.85rem}
.memfine .legend{justify-content:flex-start;flex-wrap:wrap;gap:.2rem 1rem;margin-top:.3rem}
.memfine .legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.35rem;opacity:.5}
.memfine .legend i.live{height:2px;vertical-align:middle;opacity:1;background:var(--ink)}
"""
)


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
            line += f", {readable_bytes(num_bytes)} {what}"
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
    return f"{size} a chunk{chunks}, {readable_bytes(plan.predicted_bytes)} predicted"


def _step(step: StepReport) -> str:
    terms = sorted((term for term in (*step.static, *step.peak.terms) if term[1] > 0), key=lambda term: -term[1])
    largest = terms[0][1] if terms else 1
    rows = (
        (
            _cell(name),
            f'<td class="number">{readable_bytes(num_bytes)}</td>',
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
        f'fill="var(--{span.name.partition(" ")[0]},#888888)"><title>{escape(span.name)}</title></rect>'
        for span in timeline.spans
    )
    drawn = [(_WIDTH * time / last, _HEIGHT * (1 - max(0, live) / most)) for time, live in _highest(timeline)]
    corners = [(after[0], before[1]) for before, after in pairwise(drawn)]
    steps = [point for both in zip(drawn, [*corners, drawn[-1]], strict=True) for point in both]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in steps)
    kinds = dict.fromkeys(span.name.partition(" ")[0] for span in timeline.spans)
    legend = "".join(
        f'<span><i style="background:var(--{kind},#888888)"></i>chunked region, {escape(kind)}</span>' for kind in kinds
    )
    # Text stands beside the drawing, which a narrow screen shrinks.
    return (
        f"<h3>The measured step: at most {readable_bytes(most)} beyond its start, {last / 1e3:.1f} ms while traced</h3>"
        f'<div class="axis"><span>{readable_bytes(most)}</span></div>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="live memory over the step">{stretches}<polyline points="{points}" fill="none" '
        'stroke="var(--ink)" stroke-width="1.2" vector-effect="non-scaling-stroke"/></svg>'
        f'<div class="axis"><span>0 B at 0 ms</span><span>time in the step</span><span>{last / 1e3:.1f} ms</span></div>'
        f'<div class="legend"><span><i class="live"></i>live bytes beyond the start of the step</span>{legend}</div>'
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


def first_step_line(report: Report, budget: object = None) -> str:
    """Return one line: layers chunked of layers found, the predicted peak of the step, the budget.

    Args:
        report: of the model, after its first step.
        budget: as the user gave it: bytes, text such as "20GiB", or None.
    """
    line = chunked_in_words(report)
    if report.predicted_peak_bytes is not None:
        line += f", {readable_bytes(report.predicted_peak_bytes)} predicted"
    return line + f", budget {_readable_budget(budget)}"


def chunked_in_words(report: Report) -> str:
    """Return how many layers of those that were found are chunked."""
    num_chunked, num_left = len(_chunked_layers(report)), len(unchunked_layers(report))
    return f"{num_chunked} of {num_chunked + num_left} MoE layers chunked"


def unchunked_layers(report: Report) -> list[RegionReport]:
    """Return the refused regions of layers that are chunked in no graph; a choice without experts is no layer."""
    chunked = _chunked_layers(report)
    refused = (region for region in report.regions if region.status == "refused" and region.has_experts)
    return list({_layer_of(region): region for region in refused if _layer_of(region) not in chunked}.values())


def by_reason(refused: Iterable[RegionReport]) -> str:
    """Return refusals in one text: each reason once, with the layers that it is the reason of."""
    layers: dict[str, list[str]] = {}
    for region in refused:
        layers.setdefault(region.reason, []).append(str(region.where))
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in layers.items())


def _chunked_layers(report: Report) -> set[object]:
    return {_layer_of(region) for region in report.regions if region.status == "chunked"}


def _layer_of(region: RegionReport) -> object:
    """Return the region's module, which training, evaluation and recompiled graphs have in common."""
    return region.where.module or id(region)


def _readable_budget(budget: object) -> str:
    if budget is None:
        return "automatic"
    return readable_bytes(budget) if isinstance(budget, int) else str(budget)
