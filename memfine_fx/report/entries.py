"""Reports of one region, of one head, and of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memfine_fx.errors import Reason
from memfine_fx.records import ChunkPlan, RegionDims, Where, short_place
from memfine_fx.records.heads import HeadDims, HeadPlan
from memfine_fx.report.picture import RegionGraph
from memfine_fx.runtime.loads import Imbalance, RoundStats
from memfine_fx.units import readable_bytes

if TYPE_CHECKING:  # sympy would be most of the package's import time
    import sympy

    from memfine_fx.memory.step import StepPeak


__all__ = ["HeadReport", "RegionReport", "StepReport"]


def _refused(what: str, reason: str, node: str | None, hint: str, obstacle: str) -> str:
    named = [f"node {node}"] * bool(node) + [f"at {short_place(obstacle)}"] * bool(obstacle)
    at = f" [{' '.join(named)}]" if named else ""
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
        body_key: content hash of the compiled experts; equal for layers that share them.
        node: the graph node where a proof stopped.
        obstacle: that node's "file:line" where it is another one than in `where`.
        verified_error: worst relative error that `verify` saw, None where it was not asked for.
        refused_for: name of the `errors.Reason`, "" if chunked.
        hint: what can be done about a refusal.
        graph: the region with its router, from `explain`; see `picture`.
        uncompared: why its gradients could not be compared with autograd's when it was compiled, "" where they agree.
        not_compared_with_code: why its layer could not be compared with the model's own code, "" where they agree.
        makes_tables: where tables are computed (adapters, quantized weights): how each expert's is made when it runs.
        why_expanded: why such tables are computed whole, ahead of the experts; "" where they are not.
        runs_in: on a GPU, "GPU kernels", or "compiled functions" and why; "" elsewhere.
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
    obstacle: str = ""
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
            return _refused(str(self.where), self.reason, self.node, self.hint, self.obstacle)
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
        predicted = readable_bytes(plan.predicted_bytes)
        return f"{line}; axis {plan.axis}, {size} a chunk{ran}, predicted {predicted}; {plan.reason}"


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
    obstacle: str = ""
    refused_for: str = ""
    hint: str = ""

    def __str__(self) -> str:
        if self.status == "refused":
            return _refused(f"head {self.where}", self.reason, self.node, self.hint, self.obstacle)
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
        predicted = readable_bytes(plan.predicted_bytes)
        return f"{line}; {plan.tokens_per_chunk} tokens a chunk{ran}, predicted {predicted}; {plan.reason}"


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
        head = f"  predicted peak of the step: {readable_bytes(self.predicted_peak_bytes)}, in its {self.peak.where}"
        lines = [head, *(f"    {readable_bytes(num_bytes):>10}  {name}" for name, num_bytes in terms)]
        return [*lines, *(f"  {words}" for words in (self.decision, self.budget) if words)]
