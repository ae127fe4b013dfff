"""Keep Inductor from fusing side by side what stands before a chunked region with what stands after it.

Kernels that neither feeds the other are fused where they read the same memory: the rotary embedding of one layer's
attention, computed again in backward, with that of the next. Its results are then alive while the experts between them
run. Inductor refuses such fusions between kernels that are far apart in the graph; here a region counts as far.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import custom_graph_pass

from memfine_fx.memory.liveness import OP_PHASES
from memfine_fx.passes.kernel_order import SchedulerPass

__all__ = ["RegionDistance"]

_DISTANCE = 1024
"""Places; Inductor fuses side by side up to 64."""
_REGIONS = frozenset(f"memfine::{name}" for name, phase in OP_PHASES.items() if phase in ("forward", "backward"))


class RegionDistance(SchedulerPass):  # type: ignore[misc]  # its base depends on the version
    """Inductor scheduler pass (`_pre_fusion_custom_pass`): places of kernels, with a gap after each region."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        gap = 0
        for node in nodes:
            node.min_order += gap
            node.max_order += gap
            if _is_region(node):
                gap += _DISTANCE
        return nodes

    def uuid(self) -> Any:
        return custom_graph_pass.get_hash_for_files((__file__,))


def _is_region(node: Any) -> bool:
    operation = getattr(getattr(node, "node", None), "op_overload", None)
    return operation is not None and operation.name().split(".")[0] in _REGIONS
