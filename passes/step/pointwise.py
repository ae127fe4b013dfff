"""Spare: without a budget, forward saves for backward only what would cost time to recompute.

Elementwise work is recomputed freely, inside the kernels of backward that read it. Matmuls and attentions are saved,
except those that free most bytes per FLOP: they may add a small share to the FLOPs outside of regions (`_SHARE`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memfine_fx.compat.settings import RECOMPUTED_POINTWISE
from memfine_fx.memory.step import GraphStep
from memfine_fx.passes.step.costly_results import CostlyResult, is_attention, must_save

__all__ = ["cheapest", "has_checkpoints", "recomputing_pointwise"]

_SHARE = 0.02
_STEP_PER_FORWARD = 3
"""Backward takes two products for each of forward's."""


def has_checkpoints(joint: fx.Graph) -> bool:
    """Whether layers of the model are checkpointed by its own wish."""
    return any("ac_graph_id" in node.meta for node in joint.nodes)


def recomputing_pointwise(
    gm: fx.GraphModule,
    results: Sequence[CostlyResult],
    partition: Callable[..., GraphStep],
    *,
    of_regions: str = "",
) -> GraphStep:
    """Return a partition that recomputes elementwise work and the costly results that cost least for their bytes.

    Args:
        gm: the joint graph; what must be saved or recomputed is tagged in it.
        results: its costly results.
        partition: (graph, decision) -> partition.
        of_regions: what was decided for them, in words.
    """
    again = {result.name for result in cheapest(results)}
    for node in gm.graph.nodes:
        if node.name in again:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        elif is_attention(node):
            must_save(node)
    costly = f"and {len(again)} of {len(results)} costly results, those that cost least for their bytes"
    decision = f"elementwise work is recomputed in backward, {costly if results else 'and nothing costly'}" + (
        f"; {of_regions}" if of_regions else ""
    )
    with RECOMPUTED_POINTWISE.applied():
        return partition(gm, decision=decision)


def cheapest(results: Sequence[CostlyResult]) -> list[CostlyResult]:
    """Return the costly results to recompute, the least worth saving first, as far as their share of the FLOPs goes."""
    left = _SHARE * _STEP_PER_FORWARD * sum(result.flops for result in results)
    chosen = []
    # Those most worth saving stand first.
    for result in reversed(results):
        left -= result.flops
        if left < 0:
            break
        chosen.append(result)
    return chosen
