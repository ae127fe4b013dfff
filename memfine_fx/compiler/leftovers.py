"""What Dynamo flags let into a graph beside regions: an attempt under them is good only where nothing is left over.

Without the flags the loop over experts is outside the graph, and nothing there says why it was not chunked: the attempt
did. So its refusals are kept, and told in the place of graph breaks.
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
    kept: list[Refusal],
    cuts: Sequence[OpenCut] = (),
) -> None:
    """Refuse an attempt that helped nothing here, or that runs skipped bodies which may raise without rows.

    Data-dependent shapes beside a loop that was raised are left to the compiler: it fails now or never.

    Args:
        kept: given the refusals of layers that the attempt saw whole.
        cuts: that only a region proves which swallows them.

    Raises:
        LeftoverShapes: the attempt is given up.
        GuardRefused: a rewritten loop is not proved.
    """
    lowered = [one for one in outcomes if isinstance(one, LoweredRegion)]
    has_loop = any(one.region.family == "loops" for one in lowered)
    swallowed = {node for one in lowered for node in one.region.cut.nodes}
    for cut in cuts:
        if not swallowed.issuperset(cut.nodes):
            raise cut.refusal
    _check_rewritten(body.graph, swallowed)
    for node in body.graph.nodes:
        may_raise = GUARDED in node.meta and not is_total(node)
        is_left = may_raise or (not has_loop and has_unbacked_shape(node))
        if node not in swallowed and is_left and not is_only_asserted(node):
            refusals = [one for one in outcomes if isinstance(one, Refusal)]
            kept.extend(one for one in refusals if one.reason not in (Reason.GRAPH_BREAK, Reason.NO_EXPERTS))
            reason = f"; refused: {'; '.join(one.details for one in refusals)}" if refusals else ""
            raise LeftoverShapes(f"{node} at {provenance(node)} has a data-dependent shape and is in no region{reason}")


def _check_rewritten(graph: fx.Graph, swallowed: set[fx.Node]) -> None:
    """Refuse rewritten loops of a module in which nothing is chunked: nobody compares them with the code as written."""
    chunked = {node.meta[GUARDED][1] for node in swallowed if GUARDED in node.meta}
    for node in graph.nodes:
        where, module = node.meta.get(GUARDED, ("", ""))
        if where and module not in chunked:
            raise GuardRefused("its experts are in no chunked layer", where, module)


def as_told_by_attempts(
    outcomes: Sequence[LoweredRegion | Refusal], kept: Sequence[Refusal]
) -> list[LoweredRegion | Refusal]:
    """Outcomes in which a graph break before the experts is what an attempt without that break refused them for."""
    return [_told(one, kept) if isinstance(one, Refusal) else one for one in outcomes]


def _told(refusal: Refusal, kept: Sequence[Refusal]) -> Refusal:
    layer = refusal.where.module.rpartition(".")[0]  # a router and its experts stand in one module
    of_layer = [one for one in kept if not layer or one.where.module.startswith(f"{layer}.")]
    return of_layer[0] if of_layer and refusal.reason is Reason.GRAPH_BREAK else refusal
