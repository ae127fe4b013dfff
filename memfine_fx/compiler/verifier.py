"""Between check and lower: verify the regions of one captured graph, and refuse those that do not pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from memfine_fx.compiler.captured_graph import CapturedGraph, LoweredHead, LoweredRegion
from memfine_fx.compiler.regions import BodyRegions
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.modes import modes_at
from memfine_fx.passes.verify.head import cut_of_head, verify_head
from memfine_fx.passes.verify.real_run import Recorded, record_regions
from memfine_fx.passes.verify.region import verify_region
from memfine_fx.records import Modes, Refusal
from memfine_fx.records.verification import RegionVerification

__all__ = ["verify_found"]

_RUN_ERRORS = (CannotChunk, RuntimeError, TypeError, ValueError, IndexError, AttributeError)


def verify_found(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], found: Sequence[BodyRegions], record: CapturedGraph
) -> list[BodyRegions]:
    """Verify what was raised in a graph and its bodies.

    Args:
        graph_module: the captured graph, nothing lowered yet.
        example_inputs: its inputs in the call that is being compiled.
        found: regions and refusals by body.
        record: of the graph; given the verifications, and refusals in place of heads that did not pass.

    Returns:
        `found` with a refusal in place of each region that did not pass.
    """
    record.verifications, judged = _verify_regions(graph_module, example_inputs, found)
    of_heads, record.heads = _verify_heads(graph_module, example_inputs, record.heads)
    record.verifications += of_heads
    regions = {
        outcome.live.region_id for body in judged for outcome in body.outcomes if isinstance(outcome, LoweredRegion)
    }
    heads = {head.live.region_id for head in record.heads if isinstance(head, LoweredHead)}
    for passed_region_ids, memory in ((regions, record.step.regions), (heads, record.step.heads)):
        for region_id in memory.keys() - passed_region_ids:
            del memory[region_id]
    return judged


def _verify_regions(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], found: Sequence[BodyRegions]
) -> tuple[list[RegionVerification], list[BodyRegions]]:
    raised = [
        (body_regions.body, outcome)
        for body_regions in found
        for outcome in body_regions.outcomes
        if _is_raised(outcome)
    ]
    values = iter(_record(graph_module, example_inputs, raised))
    verifications: list[RegionVerification] = []
    result: list[BodyRegions] = []
    for body_regions in found:
        at = modes_at(body_regions.body.graph, body_regions.modes)
        outcomes: list[LoweredRegion | Refusal] = []
        for outcome in body_regions.outcomes:
            if isinstance(outcome, LoweredRegion):
                verification = _verify(outcome, next(values), at[outcome.region.cut.exit])
                verifications.append(verification)
                outcome = _judged(outcome, verification)
            outcomes.append(outcome)
        result.append(replace(body_regions, outcomes=outcomes))
    return verifications, result


def _verify_heads(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], heads: Sequence[LoweredHead | Refusal]
) -> tuple[list[RegionVerification], list[LoweredHead | Refusal]]:
    """As `_verify_regions`, for the heads of a graph."""
    lowered = [head for head in heads if isinstance(head, LoweredHead)]
    if not lowered:
        return [], list(heads)
    cuts = [(graph_module, cut_of_head(head.region)) for head in lowered]
    recorded: Sequence[Recorded | str | None]
    try:
        recorded = record_regions(graph_module, example_inputs, cuts)
    except _RUN_ERRORS as error:
        recorded = [f"the graph could not be run to record its heads: {error}"] * len(lowered)
    at = modes_at(graph_module.graph, Modes())
    values, verifications = iter(recorded), []
    outcomes: list[LoweredHead | Refusal] = []
    for head in heads:
        if isinstance(head, LoweredHead):
            verification = _verify_head(head, next(values), at[head.region.exit])
            verifications.append(verification)
            outcomes.append(_judged_head(head, verification))
        else:
            outcomes.append(head)
    return verifications, outcomes


def _verify_head(head: LoweredHead, recorded: Recorded | str | None, modes: Modes) -> RegionVerification:
    unverified = RegionVerification(head.region.where, "head", "", 0.0, (), 0.0, None)
    if not isinstance(recorded, Recorded):
        return replace(unverified, failure=recorded or "the call did not pass this head")
    try:
        return verify_head(head.region, head.live, recorded, modes)
    except _RUN_ERRORS as error:
        return replace(unverified, failure=f"it could not be verified: {type(error).__name__}: {error}")


def _judged_head(head: LoweredHead, verification: RegionVerification) -> LoweredHead | Refusal:
    if verification.has_passed:
        return replace(head, verification=verification)
    return Refusal(head.region.where, Reason.VERIFICATION_FAILED, f"verification failed: {verification.failure}")


def _is_raised(outcome: LoweredRegion | Refusal) -> bool:
    return isinstance(outcome, LoweredRegion)


def _record(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], raised: Sequence[tuple[fx.GraphModule, Any]]
) -> list[Recorded | str | None]:
    if not raised:
        return []
    try:
        return list(
            record_regions(graph_module, example_inputs, [(body, outcome.region.cut) for body, outcome in raised])
        )
    except _RUN_ERRORS as error:
        return [f"the graph could not be run to record its regions: {error}"] * len(raised)


def _verify(outcome: LoweredRegion, recorded: Recorded | str | None, modes: Modes) -> RegionVerification:
    region = outcome.region
    unverified = RegionVerification(region.where, region.family, "", 0.0, (), 0.0, None)
    if not isinstance(recorded, Recorded):
        return replace(unverified, failure=recorded or "the call did not pass this region")
    try:
        return verify_region(region, outcome.live, recorded, modes)
    except _RUN_ERRORS as error:
        return replace(unverified, failure=f"it could not be verified: {type(error).__name__}: {error}")


def _judged(outcome: LoweredRegion, verification: RegionVerification) -> LoweredRegion | Refusal:
    if verification.has_passed:
        return replace(outcome, verification=verification)
    return Refusal(outcome.region.where, Reason.VERIFICATION_FAILED, f"verification failed: {verification.failure}")
