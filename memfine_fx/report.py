"""Reports: what was found, chosen or refused, and why; as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memfine_fx.errors import MemfineError
from memfine_fx.memory.timeline import Timeline
from memfine_fx.records import ChunkPlan, RegionDims, Where

__all__ = ["RegionReport", "Report"]


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
        body_key: content hash of the expert bodies; equal for layers that share them.
        node: the graph node where a proof stopped.
    """

    status: Literal["chunked", "refused"]
    where: Where
    reason: str
    family: str | None = None
    dims: RegionDims | None = None
    plan: ChunkPlan | None = None
    num_tokens: int = 0
    num_chunks: int = 0
    body_key: str | None = None
    node: str | None = None

    def __str__(self) -> str:
        if self.status == "refused":
            at = f" [node {self.node}]" if self.node else ""
            return f"refused  {self.where}: {self.reason}{at}"
        dims = self.dims
        assert dims is not None
        tokens = self.num_tokens or dims.tokens
        sizes = f"T={tokens} H={dims.hidden} E={dims.num_experts} K={dims.top_k} F={dims.expert_width}"
        line = f"chunked  {self.where}: {self.family}, {sizes}"
        if self.plan is None:
            return f"{line}; plan chosen at the first step"
        plan = self.plan
        size = f"R={plan.rows_per_chunk}" if plan.axis == "rows" else f"{plan.tokens_per_chunk} tokens"
        ran = f", {self.num_chunks} chunks" if self.num_chunks else ""
        return f"{line}; axis {plan.axis}, {size} a chunk{ran}, predicted {plan.predicted_bytes:,} B; {plan.reason}"


@dataclass(frozen=True)
class Report:
    """All regions of a model.

    Args:
        regions: in the order in which the graphs were compiled.
        num_graphs: graphs that Dynamo captured (bodies of higher-order ops not counted).
        predicted_bytes: largest predicted working set of one region; None before a plan exists.
        measured_bytes: measured peak of the step beyond what was alive before it, or None.
        timeline: memory over the measured step, or None.
    """

    regions: tuple[RegionReport, ...]
    num_graphs: int
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    timeline: Timeline | None = None

    @property
    def num_chunked(self) -> int:
        return sum(region.status == "chunked" for region in self.regions)

    def __str__(self) -> str:
        head = f"memfine_fx: {self.num_chunked} of {len(self.regions)} regions chunked in {self.num_graphs} graph(s)"
        lines = [head, *(f"  {region}" for region in self.regions)]
        if not self.regions:
            lines.append("  no routing decision (top-k, arg-max) with experts behind it was found")
        if self.predicted_bytes is not None:
            lines.append(f"  largest predicted region working set: {self.predicted_bytes:,} B")
        if self.measured_bytes is not None:
            lines.append(f"  measured peak of the step beyond its start: {self.measured_bytes:,} B")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as a JSON document, without the timeline."""
        fields = dataclasses.asdict(dataclasses.replace(self, timeline=None))
        del fields["timeline"]
        return json.dumps(fields, indent=2, default=_jsonable)

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
        from memfine_fx.chart import draw_timeline

        draw_timeline(self.timeline, path)


def _jsonable(value: Any) -> str:
    return str(value)
