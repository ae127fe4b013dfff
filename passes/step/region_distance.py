"""Keep Inductor from fusing side by side what stands before a chunked region with what stands after it.

Kernels that neither feeds the other are fused where they read the same memory: the rotary embedding of one layer's
attention, recomputed in backward, with that of the next. Its results are then alive while the experts between them
run. Inductor refuses such fusions between kernels that are far apart in the graph; here a region counts as far.
"""

from __future__ import annotations

from typing import Any

from memfine_fx.compat.inductor import SchedulerPass, get_hash_for_files, region_operator
from memfine_fx.memory.liveness import OP_PHASES
from memfine_fx.passes.pass_list import run_pass

__all__ = ["RegionDistance"]

_DISTANCE = 1024
"""Places; Inductor fuses side by side up to 64."""
_REGIONS = frozenset(f"memfine::{name}" for name, phase in OP_PHASES.items() if phase in ("forward", "backward"))


class RegionDistance(SchedulerPass):  # type: ignore[misc]  # its base depends on the version
    """Inductor scheduler pass (`_pre_fusion_custom_pass`): places of kernels, with a gap after each region."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return run_pass("region_distance", nodes, lambda: _with_gaps(nodes), nodes)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _with_gaps(nodes: list[Any]) -> list[Any]:
    gap = 0
    for node in nodes:
        node.min_order += gap
        node.max_order += gap
        if region_operator(node) in _REGIONS:
            gap += _DISTANCE
    return nodes
