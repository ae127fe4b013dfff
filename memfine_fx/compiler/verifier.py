"""Between raise and lower: verify the regions of one captured graph, and refuse those that do not pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from memfine_fx.compiler.session import LoweredHead, LoweredRegion
from memfine_fx.errors import CannotChunk
from memfine_fx.passes.modes import modes_at
from memfine_fx.passes.verify.head import cut_of_head, verify_head
from memfine_fx.passes.verify.real_run import Recorded, record_regions
from memfine_fx.passes.verify.region import verify_region
from memfine_fx.records import Modes, Refusal
from memfine_fx.records.heads import HeadRefusal
from memfine_fx.records.verification import RegionVerification

__all__ = ["verify_heads", "verify_outcomes"]

Outcomes = list[LoweredRegion | Refusal]
_RUN_ERRORS = (CannotChunk, RuntimeError, TypeError, ValueError, IndexError, AttributeError)


def verify_outcomes(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    found: Sequence[tuple[fx.GraphModule, Modes, Outcomes]],
) -> tuple[list[RegionVerification], list[tuple[fx.GraphModule, Modes, Outcomes]]]:
    """Verify what was raised in a graph and its bodies.

    Args:
        graph_module: the captured graph, nothing lowered yet.
        example_inputs: its inputs in the call that is being compiled.
        found: (body, modes at its start, outcomes).

    Returns:
        The verifications, and `found` with a refusal in place of each region that did not pass.
    """
    raised = [(body, outcome) for body, _, outcomes in found for outcome in outcomes if _is_raised(outcome)]
    recorded = _record(graph_module, example_inputs, raised)
    values = iter(recorded)
    verifications: list[RegionVerification] = []
    result: list[tuple[fx.GraphModule, Modes, Outcomes]] = []
    for body, modes, outcomes in found:
        at = modes_at(body.graph, modes)
        kept: Outcomes = []
        for outcome in outcomes:
            if isinstance(outcome, LoweredRegion):
                verification = _verify(outcome, next(values), at[outcome.region.cut.exit])
                verifications.append(verification)
                outcome = _judged(outcome, verification)
            kept.append(outcome)
        result.append((body, modes, kept))
    return verifications, result


def verify_heads(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], heads: Sequence[LoweredHead | HeadRefusal]
) -> tuple[list[RegionVerification], list[LoweredHead | HeadRefusal]]:
    """As `verify_outcomes`, for the heads of a graph."""
    found = [head for head in heads if isinstance(head, LoweredHead)]
    if not found:
        return [], list(heads)
    cuts = [(graph_module, cut_of_head(head.region)) for head in found]
    recorded: Sequence[Recorded | str | None]
    try:
        recorded = record_regions(graph_module, example_inputs, cuts)
    except _RUN_ERRORS as error:
        recorded = [f"the graph could not be run to record its heads: {error}"] * len(found)
    at = modes_at(graph_module.graph, Modes())
    values, verifications = iter(recorded), []
    kept: list[LoweredHead | HeadRefusal] = []
    for head in heads:
        if isinstance(head, LoweredHead):
            verification = _verify_head(head, next(values), at[head.region.exit])
            verifications.append(verification)
            kept.append(_judged_head(head, verification))
        else:
            kept.append(head)
    return verifications, kept


def _verify_head(head: LoweredHead, recorded: Recorded | str | None, modes: Modes) -> RegionVerification:
    unverified = RegionVerification(head.region.where, "head", "", 0.0, (), 0.0, None)
    if not isinstance(recorded, Recorded):
        return replace(unverified, failure=recorded or "the call did not pass this head")
    try:
        return verify_head(head.region, head.live, recorded, modes)
    except _RUN_ERRORS as error:
        return replace(unverified, failure=f"it could not be verified: {type(error).__name__}: {error}")


def _judged_head(head: LoweredHead, verification: RegionVerification) -> LoweredHead | HeadRefusal:
    if verification.has_passed:
        return replace(head, verification=verification)
    return HeadRefusal(head.region.where, f"verification failed: {verification.failure}")


def _is_raised(outcome: LoweredRegion | Refusal) -> bool:
    return isinstance(outcome, LoweredRegion)


def _record(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], raised: Sequence[tuple[fx.GraphModule, Any]]
) -> list[Recorded | str | None]:
    if not raised:
        return []
    try:
        return list(record_regions(graph_module, example_inputs, [(body, one.region.cut) for body, one in raised]))
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
    return Refusal(outcome.region.where, f"verification failed: {verification.failure}")
