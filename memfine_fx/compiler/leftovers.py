"""Checks for data-dependent shapes that Dynamo's flags let into a graph and that no region contains.

An attempt under these flags is accepted only if nothing is left over. Without the flags the loop over experts is
outside the graph, where nothing says why it was not chunked; the attempt said so. So the refusals of the attempt are
stored, and reported in the place of graph breaks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from memfine_fx.compiler.captured_graph import LoweredRegion
from memfine_fx.errors import GuardRefused, LeftoverShapes, Reason
from memfine_fx.passes.dataflow import has_unbacked_shape, is_only_asserted, provenance
from memfine_fx.passes.read.guards import GUARDED, OpenCut, is_total
from memfine_fx.records import Refusal

__all__ = ["as_told_by_attempts", "check_leftover_shapes"]


def check_leftover_shapes(
    body: fx.GraphModule,
    outcomes: Sequence[LoweredRegion | Refusal],
    whole_layers: list[Refusal],
    cuts: Sequence[OpenCut] = (),
) -> None:
    """Refuse an attempt that helped nothing here, or that runs skipped bodies which may raise without rows.

    Data-dependent shapes beside a loop that was raised are left to the compiler: it fails now or never.

    Args:
        whole_layers: extended by the refusals of layers that the attempt saw whole.
        cuts: that only a region proves which swallows them.

    Raises:
        LeftoverShapes: the attempt is given up.
        GuardRefused: a rewritten loop is not proved.
    """
    lowered = [outcome for outcome in outcomes if isinstance(outcome, LoweredRegion)]
    has_loop = any(outcome.region.family == "loops" for outcome in lowered)
    swallowed = {node for outcome in lowered for node in outcome.region.cut.nodes}
    for cut in cuts:
        if not swallowed.issuperset(cut.nodes):
            raise cut.refusal
    _check_rewritten(body.graph, swallowed, [outcome for outcome in outcomes if isinstance(outcome, Refusal)])
    for node in body.graph.nodes:
        may_raise = GUARDED in node.meta and not is_total(node)
        is_left = may_raise or (not has_loop and has_unbacked_shape(node))
        if node not in swallowed and is_left and not is_only_asserted(node):
            refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
            whole_layers.extend(
                refusal for refusal in refusals if refusal.reason not in (Reason.GRAPH_BREAK, Reason.NO_EXPERTS)
            )
            reason = f"; refused: {'; '.join(refusal.details for refusal in refusals)}" if refusals else ""
            raise LeftoverShapes(f"{node} at {provenance(node)} has a data-dependent shape and is in no region{reason}")


def _check_rewritten(graph: fx.Graph, swallowed: set[fx.Node], refusals: Sequence[Refusal]) -> None:
    """Refuse rewritten loops of a module in which nothing is chunked: nobody compares them with the code as written."""
    chunked = {node.meta[GUARDED][1] for node in swallowed if GUARDED in node.meta}
    for node in graph.nodes:
        where, module = node.meta.get(GUARDED, ("", ""))
        if where and module not in chunked:
            reasons = [refusal.details for refusal in refusals if refusal.where.module.startswith(module)]
            details = f": {'; '.join(dict.fromkeys(reasons))}" if reasons else ""
            raise GuardRefused(f"its experts are in no chunked layer{details}", where, module)


def as_told_by_attempts(
    outcomes: Sequence[LoweredRegion | Refusal], whole_layers: Sequence[Refusal]
) -> list[LoweredRegion | Refusal]:
    """Outcomes in which a graph break before the experts is what an attempt without that break refused them for."""
    return [_explain(outcome, whole_layers) if isinstance(outcome, Refusal) else outcome for outcome in outcomes]


def _explain(refusal: Refusal, whole_layers: Sequence[Refusal]) -> Refusal:
    layer = refusal.where.module.rpartition(".")[0]  # a router and its experts stand in one module
    of_layer = [candidate for candidate in whole_layers if not layer or candidate.where.module.startswith(f"{layer}.")]
    return of_layer[0] if of_layer and refusal.reason is Reason.GRAPH_BREAK else refusal
