"""Between check and lower: verify the regions of one captured graph, and refuse those that do not pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from memfine_fx.compiler.captured_graph import CapturedGraph, LoweredHead, LoweredRegion
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.modes import modes_at
from memfine_fx.passes.verify.head import cut_of_head, verify_head
from memfine_fx.passes.verify.real_run import Recorded, record_regions
from memfine_fx.passes.verify.region import verify_region
from memfine_fx.records import Cut, Modes, Refusal
from memfine_fx.records.verification import RegionVerification

__all__ = ["verify_graph"]

LoweredT = TypeVar("LoweredT", LoweredRegion, LoweredHead)

_RUN_ERRORS = (CannotChunk, RuntimeError, TypeError, ValueError, IndexError, AttributeError)


def verify_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    bodies: Sequence[tuple[fx.GraphModule, Modes]],
    outcomes: Sequence[Sequence[LoweredRegion | Refusal]],
    record: CapturedGraph,
) -> list[list[LoweredRegion | Refusal]]:
    """Verify what was raised in a graph and its bodies.

    Args:
        graph_module: the captured graph, nothing lowered yet.
        example_inputs: its inputs in the call that is being compiled.
        bodies: of the graph, with the modes in which each begins.
        outcomes: regions and refusals of each body.
        record: of the graph; given the verifications, and refusals in place of heads that did not pass.

    Returns:
        `outcomes` with a refusal in place of each region that did not pass.
    """
    of_bodies = list(zip(bodies, outcomes, strict=True))
    cuts = [(body, own.region.cut) for (body, _), owns in of_bodies for own in owns if isinstance(own, LoweredRegion)]
    values = iter(_recorded(graph_module, example_inputs, cuts, "regions"))
    judged: list[list[LoweredRegion | Refusal]] = []
    for (body, modes), owns in of_bodies:
        at = modes_at(body.graph, modes)
        judged.append(
            [
                _judged(own, next(values), at[own.region.cut.exit], record) if isinstance(own, LoweredRegion) else own
                for own in owns
            ]
        )
    cuts = [(graph_module, cut_of_head(head.region)) for head in record.heads if isinstance(head, LoweredHead)]
    values, at = iter(_recorded(graph_module, example_inputs, cuts, "heads")), modes_at(graph_module.graph, Modes())
    record.heads = [
        _judged(head, next(values), at[head.region.exit], record) if isinstance(head, LoweredHead) else head
        for head in record.heads
    ]
    regions = {own.live.region_id for owns in judged for own in owns if isinstance(own, LoweredRegion)}
    heads = {head.live.region_id for head in record.heads if isinstance(head, LoweredHead)}
    for passed_region_ids, memory in ((regions, record.step.regions), (heads, record.step.heads)):
        for region_id in memory.keys() - passed_region_ids:
            del memory[region_id]
    return judged


def _recorded(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], cuts: Sequence[tuple[fx.GraphModule, Cut]], what: str
) -> list[Recorded | str | None]:
    """Return the values that reach each cut in a run of the graph; text where the graph cannot be run.

    Args:
        what: the cuts are of, in words.
    """
    if not cuts:
        return []
    try:
        return list(record_regions(graph_module, example_inputs, cuts))
    except _RUN_ERRORS as error:
        return [f"the graph could not be run to record its {what}: {error}"] * len(cuts)


def _judged(
    outcome: LoweredT, recorded: Recorded | str | None, modes: Modes, record: CapturedGraph
) -> LoweredT | Refusal:
    """Return a region or head with its verification, or the refusal that it gives; the record gets the verification."""
    where = outcome.region.where
    family = "head" if isinstance(outcome, LoweredHead) else outcome.region.family
    verification = RegionVerification(where, family, "", 0.0, (), 0.0, None)
    if isinstance(recorded, Recorded):
        try:
            if isinstance(outcome, LoweredHead):
                verification = verify_head(outcome.region, outcome.live, recorded, modes)
            else:
                verification = verify_region(outcome.region, outcome.live, recorded, modes)
        except _RUN_ERRORS as error:
            failure = f"it could not be verified: {type(error).__name__}: {error}"
            verification = replace(verification, failure=failure)
    else:
        failure = recorded or f"the call did not pass this {'head' if family == 'head' else 'region'}"
        verification = replace(verification, failure=failure)
    record.verifications.append(verification)
    if verification.has_passed:
        return replace(outcome, verification=verification)
    return Refusal(where, Reason.VERIFICATION_FAILED, f"verification failed: {verification.failure}")
