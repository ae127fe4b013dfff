"""Reports: what was found, chosen or refused, and why; as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memfine_fx.errors import MemfineError, Reason
from memfine_fx.memory.timeline import Timeline
from memfine_fx.records import ChunkPlan, RegionDims, Where
from memfine_fx.records.heads import HeadDims, HeadPlan
from memfine_fx.report.picture import RegionGraph, region_svg
from memfine_fx.runtime.loads import Imbalance, RoundStats

if TYPE_CHECKING:  # sympy would be most of the package's import time
    import sympy

    from memfine_fx.memory.step import StepPeak

__all__ = ["HeadReport", "RegionReport", "Report"]


def _refused(what: str, reason: str, node: str | None, hint: str) -> str:
    at = f" [node {node}]" if node else ""
    return f"refused  {what}: {reason}{at}" + f"\n           hint: {hint}"


@dataclass(frozen=True)
class RegionReport:
    """One region, or one routing decision that led to none.

    Args:
        status: "chunked" or "refused".
        where: module path and source line.
        reason: why this plan, or why refused.
        family: spelling that matched, None if refused.
        dims: sizes, None if refused.
        plan: what ran last (or would run), None if refused or not yet run.
        num_tokens: T of that run.
        num_chunks: chunks of that run, 0 if it has not run.
        largest_chunk: rows of its largest chunk.
        imbalance: how uneven its routing was in the latest steps, None if it has not run.
        num_ranks: that share its experts.
        rounds: of its latest step, where its experts live on several ranks.
        num_added: gradients of its parameters that its latest backward added to where they were, making no others.
        body_key: content hash of the expert bodies; equal for layers that share them.
        node: the graph node where a proof stopped.
        verified_error: worst relative error that `verify` saw, None where it was not asked for.
        refused_for: name of the `errors.Reason`, "" if chunked.
        hint: what can be done about a refusal.
        graph: the region with its router, from `explain`; see `picture`.
        uncompared: why its gradients could not be compared with autograd's when it was compiled, "" where they agree.
        not_compared_with_code: why its layer could not be compared with the model's own code, "" where they agree.
        makes_tables: where tables are computed (adapters, quantized weights): how each expert's is made when it runs.
        why_expanded: why such tables are computed whole, ahead of the experts; "" where they are not.
        runs_in: on a GPU, "GPU kernels", or "bodies" and why; "" elsewhere.
    """

    status: Literal["chunked", "refused"]
    where: Where
    reason: str
    family: str | None = None
    dims: RegionDims | None = None
    plan: ChunkPlan | None = None
    num_tokens: int = 0
    num_chunks: int = 0
    largest_chunk: int = 0
    imbalance: Imbalance | None = None
    num_ranks: int = 1
    rounds: RoundStats | None = None
    num_added: int = 0
    body_key: str | None = None
    node: str | None = None
    verified_error: float | None = None
    refused_for: str = ""
    hint: str = ""
    graph: RegionGraph | None = None
    uncompared: str = ""
    not_compared_with_code: str = ""
    makes_tables: str = ""
    why_expanded: str = ""
    runs_in: str = ""

    @property
    def has_experts(self) -> bool:
        """Whether experts stand behind the choice; an auxiliary loss chooses too."""
        return self.refused_for != Reason.NO_EXPERTS.name

    def __str__(self) -> str:
        if self.status == "refused":
            return _refused(str(self.where), self.reason, self.node, self.hint)
        dims = self.dims
        assert dims is not None
        tokens = self.num_tokens or dims.tokens
        sizes = f"T={tokens} H={dims.hidden} E={dims.num_experts} K={dims.top_k} F={dims.expert_width}"
        verified = "" if self.verified_error is None else f", verified to {self.verified_error:.1e}"
        line = f"chunked  {self.where}: {self.family}, {sizes}{verified}"
        if self.makes_tables:
            line += f", {self.makes_tables}"
        if self.why_expanded:
            line += f", its tables computed whole ({self.why_expanded})"
        if self.runs_in:
            line += f", in {self.runs_in}"
        if self.uncompared:
            line += f", gradients not compared when it was compiled ({self.uncompared})"
        if self.plan is None:
            return f"{line}; plan chosen at the first step"
        plan = self.plan
        size = f"R={plan.rows_per_chunk}" if not plan.tokens_per_chunk else f"{plan.tokens_per_chunk} tokens"
        ran = f", {self.num_chunks} chunks" if self.num_chunks else ""
        if self.rounds is not None:
            ran += f", {self.rounds}"
        elif self.num_ranks > 1:
            ran += f", experts on {self.num_ranks} ranks, rounds of at most {plan.rows_at_once:,} rows"
        ran += f", {plan.policy} of {plan.num_saved_rows:,} rows saved" if plan.num_saved_rows else ""
        ran += f", {self.num_added} gradients added to where they were" if self.num_added else ""
        ran += f", imbalance {self.imbalance}" if self.imbalance else ""
        return f"{line}; axis {plan.axis}, {size} a chunk{ran}, predicted {plan.predicted_bytes:,} B; {plan.reason}"


@dataclass(frozen=True)
class HeadReport:
    """A language model's head (projection and cross-entropy), or a loss whose logits stayed whole.

    Args:
        status: "chunked" or "refused".
        where: module path and source line.
        reason: why this plan, or why refused.
        dims: sizes, None if refused.
        plan: what ran last (or would run), None if refused or not yet run.
        num_tokens: T of that run, 0 if it has not run.
        num_chunks: of that run, 0 if it has not run.
        drops_logits: whether the model's output has None in the place of its logits.
        verified_error: worst relative error that `verify` saw, None where it was not asked for.
        node: the graph node that stood against it.
        refused_for: name of the `errors.Reason`, "" if chunked.
        hint: what can be done about a refusal.
    """

    status: Literal["chunked", "refused"]
    where: Where
    reason: str
    dims: HeadDims | None = None
    plan: HeadPlan | None = None
    num_tokens: int = 0
    num_chunks: int = 0
    drops_logits: bool = False
    verified_error: float | None = None
    node: str | None = None
    refused_for: str = ""
    hint: str = ""

    def __str__(self) -> str:
        if self.status == "refused":
            return _refused(f"head {self.where}", self.reason, self.node, self.hint)
        dims = self.dims
        assert dims is not None
        line = f"chunked  head {self.where}: T={self.num_tokens or dims.tokens} H={dims.hidden} V={dims.vocab}"
        if self.drops_logits:
            line += ", logits are not returned"
        if self.verified_error is not None:
            line += f", verified to {self.verified_error:.1e}"
        if self.plan is None:
            return f"{line}; plan chosen at the first step"
        ran = f", {self.num_chunks} chunks" if self.num_chunks else ""
        plan = self.plan
        return (
            f"{line}; {plan.tokens_per_chunk} tokens a chunk{ran}, predicted {plan.predicted_bytes:,} B; {plan.reason}"
        )


@dataclass(frozen=True)
class StepReport:
    """The predicted memory of a whole step.

    Args:
        static: (name, bytes) of what is there before the step: parameters, existing gradients, optimizer state.
        peak: beyond that; new gradients are among its terms.
        decision: what outside of regions is saved or recomputed, "" where that was not asked.
        expression: makes the peak as a sympy expression in the sizes that vary.
        budget: by which budget it was planned, in words.
    """

    static: tuple[tuple[str, int], ...]
    peak: StepPeak
    decision: str
    expression: Callable[[], sympy.Expr]
    budget: str = ""

    @property
    def static_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.static)

    @property
    def predicted_peak_bytes(self) -> int:
        return self.static_bytes + self.peak.num_bytes

    def lines(self) -> list[str]:
        terms = [*(term for term in self.static if term[1]), *self.peak.terms]
        terms.sort(key=lambda term: -term[1])
        head = f"  predicted peak of the step: {self.predicted_peak_bytes:,} B, in its {self.peak.where}"
        lines = [head, *(f"    {num_bytes:>16,} B  {name}" for name, num_bytes in terms)]
        return [*lines, *(f"  {words}" for words in (self.decision, self.budget) if words)]


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
            lines.append(f"  largest predicted region working set: {self.predicted_bytes:,} B")
        if self.step is not None:
            lines += self.step.lines()
        if self.measured_peak_bytes is not None and self.predicted_peak_bytes is not None:
            error = self.predicted_peak_bytes / self.measured_peak_bytes - 1
            lines.append(f"  measured peak of the step: {self.measured_peak_bytes:,} B; prediction off by {error:+.1%}")
        if self.measured_bytes is not None:
            lines.append(f"  measured peak of the step beyond its start: {self.measured_bytes:,} B")
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
        from memfine_fx.report.page import fragment

        return fragment(self)

    def to_html(self, path: str | Path) -> None:
        """Write one HTML file that needs nothing beside it.

        Args:
            path: of the file.
        """
        from memfine_fx.report.page import page

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
        from memfine_fx.report.chart import draw_timeline

        draw_timeline(self.timeline, path)


def _file_name(where: Where) -> str:
    """FILE:LINE without its folder."""
    return Path(where.source).name or "MoE region"


def _jsonable(value: Any) -> str:
    return str(value)
