"""Convert the regions, heads and refusals of a session to entries of its report."""

from __future__ import annotations

from memfine_fx.compiler.captured_graph import LoweredHead, LoweredRegion
from memfine_fx.records import MoERegion, Refusal
from memfine_fx.report.reports import HeadReport, RegionReport

__all__ = ["head_report", "outcome_report"]


def outcome_report(outcome: LoweredRegion | Refusal) -> RegionReport:
    """Return the report's entry for one region or refusal, in its current state."""
    if isinstance(outcome, Refusal):
        return RegionReport(
            "refused",
            outcome.where,
            outcome.details,
            node=outcome.node,
            refused_for=outcome.reason.name,
            hint=outcome.reason.hint,
        )
    region, live = outcome.region, outcome.live
    return RegionReport(
        "chunked",
        region.where,
        "raised, proved row-wise and lowered" if live.plan is None else live.plan.reason,
        family=region.family,
        dims=region.dims,
        plan=live.plan,
        num_tokens=live.num_tokens,
        num_chunks=live.num_chunks,
        largest_chunk=live.largest_chunk,
        imbalance=live.loads.summary(),
        num_ranks=1 if live.exchange is None else live.exchange.table_shape[0],
        rounds=live.rounds,
        num_added=live.num_added,
        body_key=live.bodies.key,
        verified_error=_verified_error(outcome),
        graph=outcome.graph,
        uncompared=outcome.uncompared,
        not_compared_with_code=outcome.not_compared_with_code,
        makes_tables=_made_tables(region, live.bodies.num_factored),
        why_expanded=outcome.region.why_expanded,
        runs_in=live.runs_in,
    )


def head_report(head: LoweredHead | Refusal) -> HeadReport:
    """Return the report's entry for one head or refusal, in its current state."""
    if isinstance(head, Refusal):
        return HeadReport(
            "refused", head.where, head.details, node=head.node, refused_for=head.reason.name, hint=head.reason.hint
        )
    live = head.live
    return HeadReport(
        "chunked",
        head.region.where,
        "only the loss reads the logits" if live.plan is None else live.plan.reason,
        dims=head.region.dims,
        plan=live.plan,
        num_tokens=live.num_tokens,
        num_chunks=live.num_chunks,
        drops_logits=bool(head.region.results) and not head.region.saves_logits,
        verified_error=_verified_error(head),
    )


def _made_tables(region: MoERegion, num_factored: int) -> str:
    """How tables that are computed are made, "" where none is."""
    if not region.makes_tables:
        return ""
    return "each expert's tables made when it runs" + (", low-rank terms factor by factor" if num_factored else "")


def _verified_error(outcome: LoweredRegion | LoweredHead) -> float | None:
    verification = outcome.verification
    return None if verification is None or verification.worst is None else verification.worst.error
