"""Optional: without a budget regions get room to save what pays; each run decides how much of it they use.

Before and after: as in `save`. The choice cannot be made here: what is compiled is not known yet, and another batch
has another peak. So regions get ops that save as many rows as the plan of their run says (`plan.problem`), in graphs
that return their loss: where it is computed elsewhere, nobody knows what is alive between forward and backward.

Refused: regions whose experts live on several ranks, since these would have to decide alike.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from memfine_fx.passes.step.fit import largest_policies, optional_of, savable_rows
from memfine_fx.passes.step.save import save_in_regions
from memfine_fx.plan.cost import DeviceRates

__all__ = ["give_room", "returns_loss"]


def give_room(joint: fx.Graph, rates: Callable[[], DeviceRates]) -> dict[str, float]:
    """Rewrite the regions of a joint graph that may save rows, and return the seconds spared per byte by region id."""
    if not returns_loss(joint):
        return {}
    regions = [amounts[:1] for amounts in savable_rows(joint, rates) if amounts[0].is_divisible]
    policies = largest_policies(regions)
    save_in_regions(joint, policies)
    return optional_of(regions, policies)


def returns_loss(joint: fx.Graph) -> bool:
    """Whether a gradient comes for a single number: backward then begins where forward ended."""
    tangents = (
        node.meta.get("val")
        for node in joint.nodes
        if node.op == "placeholder" and str(node.target).startswith("tangents_")
    )
    return any(getattr(tangent, "ndim", None) == 0 for tangent in tangents)
