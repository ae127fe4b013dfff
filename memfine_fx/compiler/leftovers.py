"""What Dynamo flags let into a graph beside regions: an attempt under them is good only where nothing is left over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from memfine_fx.compiler.captured_graph import LoweredRegion
from memfine_fx.errors import LeftoverShapes
from memfine_fx.passes.dataflow import has_unbacked_shape, is_only_asserted, provenance
from memfine_fx.passes.read.harmless import is_harmless_marker
from memfine_fx.passes.read.marker import LOOP_MARKERS
from memfine_fx.records import Refusal

__all__ = ["check_leftover_shapes"]


def check_leftover_shapes(body: fx.GraphModule, outcomes: Sequence[LoweredRegion | Refusal]) -> None:
    """Refuse an attempt that helped nothing here, or whose rewritten loops are not proved.

    Data-dependent shapes beside a loop that was raised are left to the compiler: it fails now or never.
    """
    lowered = [one for one in outcomes if isinstance(one, LoweredRegion)]
    has_loop = any(one.region.family == "loops" for one in lowered)
    swallowed = {node for one in lowered for node in one.region.cut.nodes}
    for node in body.graph.nodes:
        is_unproved = node.target in LOOP_MARKERS and not (has_loop and is_harmless_marker(node))
        is_left = is_unproved or (not has_loop and has_unbacked_shape(node))
        if node not in swallowed and is_left and not is_only_asserted(node):
            refusals = [one.details for one in outcomes if isinstance(one, Refusal)]
            reason = f"; refused: {'; '.join(refusals)}" if refusals else ""
            raise LeftoverShapes(f"{node} at {provenance(node)} has a data-dependent shape and is in no region{reason}")
