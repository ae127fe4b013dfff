"""Reports of a model: as text, JSON and pictures, and as HTML: a fragment for a notebook, and a file of its own.

HTML shows regions and heads with status and reason, what is alive at the predicted peak, and the measured step over
time where there is one. No script runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfine_fx.errors import MemfineError
from memfine_fx.memory.timeline import Timeline
from memfine_fx.records import Where
from memfine_fx.report.chart import write_charts
from memfine_fx.report.entries import HeadReport, RegionReport, StepReport
from memfine_fx.report.figure import timeline_chart
from memfine_fx.report.page import cards, document, fragment, items, section, table, wide_chart
from memfine_fx.report.picture import region_svg
from memfine_fx.units import readable_bytes

if TYPE_CHECKING:  # sympy would be most of the package's import time
    import sympy

__all__ = ["Report", "by_reason", "chunked_in_words", "first_step_line", "notebook", "page", "unchunked_layers"]


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
            lines.append(f"  layers compared with your code, run eagerly, in {self.comparison_seconds:.2g} s")
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
        return notebook(self)

    def to_html(self, path: str | Path) -> None:
        """Write one HTML file that needs nothing beside it.

        Args:
            path: of the file.
        """
        Path(path).write_text(page(self), encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draw memory over the measured step, with chunked regions and predictions, as an SVG file.

        Args:
            path: of the picture, ending in ".svg".

        Raises:
            MemfineError: nothing was measured, or the ending is another one.
        """
        if self.timeline is None:
            raise MemfineError(
                "this report holds no measured step to draw: memfine_fx.explain(model, ..., measure=True) makes one"
            )
        write_charts(path, [[("Memory over a measured step", timeline_chart(self.timeline))]], width=900)


def _file_name(where: Where) -> str:
    """FILE:LINE without its folder."""
    return Path(where.source).name or "MoE region"


def _jsonable(value: Any) -> str:
    return str(value)


def page(report: Report) -> str:
    """Return the report as a whole HTML document."""
    return document("memfine_fx report", *_parts(report))


def notebook(report: Report) -> str:
    """Return the report as HTML for the body of a page; several may stand on one page."""
    return fragment(*_parts(report))


def _parts(report: Report) -> list[str]:
    if not report.has_run:
        return ["<p><b>memfine_fx</b>: nothing has run yet; regions are found at the first call of the model</p>"]
    parts = [f"<h1>memfine_fx: {escape(report.counted)}</h1>", _peaks(report)]
    if report.regions or report.heads:
        others = [f"<p>{escape(report.others)}</p>"] if len(report.layers) < len(report.regions) else []
        layers_and_heads: list[RegionReport | HeadReport] = [*report.layers, *report.heads]
        rows = map(_cells, layers_and_heads)
        layers = table(("status", "where", "how or why not"), rows)
        parts.append(section("Layers", layers, *others))
    if report.step is not None:
        parts.append(_step(report.step))
    if report.timeline is not None and report.timeline.times_us:
        parts.append(section("The measured step", wide_chart(timeline_chart(report.timeline))))
    return [*parts, section("Notes", items(report.notes))] if report.notes else parts


def _peaks(report: Report) -> str:
    predicted, measured = report.predicted_peak_bytes, report.measured_peak_bytes
    peaks = (("predicted peak of the step", predicted), ("measured peak of the step", measured))
    cells = [(readable_bytes(num_bytes), name, False) for name, num_bytes in peaks if num_bytes is not None]
    if predicted is not None and measured is not None:
        difference = round(predicted / measured - 1, 3) + 0.0  # 0.0 turns -0.0, which would be written "-0.0%"
        cells.append((f"{difference:+.1%}", "prediction against measurement", False))
    return cards(cells) if cells else ""


def _cells(layer: RegionReport | HeadReport) -> tuple[str, ...]:
    plan = layer.plan
    imbalance = getattr(layer, "imbalance", None)
    why = [
        _ran(layer),
        layer.reason if plan is None else plan.reason,
        f"the busiest expert gets {imbalance.p50:.2f} times the mean of rows (median of {imbalance.num_calls} calls), "
        f"at most {imbalance.largest:.2f} times"
        if imbalance
        else "",
        f"hint: {layer.hint}" if layer.hint else "",
    ]
    # A phone needs places to break a long name at.
    places = (escape(layer.where.module).replace(".", ".<wbr>"), escape(Path(layer.where.source).name))
    return (
        f'<span class="{"good" if layer.status == "chunked" else "bad"}">{layer.status}</span>',
        f'<span title="{escape(str(layer.where))}">{"<br>".join(filter(None, places))}</span>',
        "<br>".join(escape(text) for text in why if text),
    )


def _ran(layer: RegionReport | HeadReport) -> str:
    plan = layer.plan
    if plan is None:
        return ""
    rows = getattr(plan, "rows_per_chunk", None)
    size = f"{plan.tokens_per_chunk} tokens" if plan.tokens_per_chunk else f"{rows} rows"
    chunks = f", {layer.num_chunks} chunks" if layer.num_chunks else ""
    return f"{size} a chunk{chunks}, {readable_bytes(plan.predicted_bytes)} predicted"


def _step(step: StepReport) -> str:
    terms = sorted((term for term in (*step.static, *step.peak.terms) if term[1] > 0), key=lambda term: -term[1])
    rows = (
        (
            escape(name),
            readable_bytes(num_bytes),
            f'<div class="meter" style="width:{100 * num_bytes / terms[0][1]:.1f}%"></div>',
        )
        for name, num_bytes in terms
    )
    words = [f"<p>{escape(text)}</p>" for text in (step.decision, step.budget) if text]
    title = f"Alive at the predicted peak of the step, in its {step.peak.where}"
    return section(title, table(("what", "memory", "share of the largest"), rows, numbers=[1]), *words)


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
