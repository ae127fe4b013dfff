"""Costly results: matmuls and attentions of a forward whose results a backward may want, with what they cost.

Each is a choice of the step's plan: saved (bytes, from forward to backward) or recomputed (FLOPs). Without a budget
forward saves for backward only what would cost time to recompute: elementwise work is recomputed freely, inside the
kernels of backward that read it. Matmuls and attentions are saved, except those that free most bytes per FLOP: they may
add a small share to the FLOPs outside of regions (`_SHARE`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from memfine_fx.compat.bitsandbytes import LINEAR_4BIT
from memfine_fx.compat.operators import OpOverload, qualified_name, viewed_arguments
from memfine_fx.compat.settings import RECOMPUTED_POINTWISE
from memfine_fx.memory.step import GraphStep
from memfine_fx.passes.dataflow import computed_from

__all__ = [
    "CostlyResult",
    "cheapest",
    "costly_results",
    "has_checkpoints",
    "is_attention",
    "must_save",
    "recomputing_pointwise",
    "size_hint",
]


@dataclass(frozen=True)
class CostlyResult:
    """One node of a joint graph: its name, bytes of its results, FLOPs to compute it again.

    Args:
        is_returned: whether forward returns it, or a view of it: its caller holds it whether backward reads it or not.
    """

    name: str
    num_bytes: int
    flops: int
    is_in_last_layer: bool
    is_returned: bool = False


def costly_results(joint: fx.Graph, num_forward_outputs: int) -> list[CostlyResult]:
    """Return the costly results of the forward, those most worth saving first.

    Results of the last layer (after the last but one region) come first: its backward begins at once, so saving
    them adds next to nothing to the peak. Then by FLOPs per byte; later ones first among equals.
    """
    reached = computed_from(_forward_outputs(joint, num_forward_outputs))
    forward = [node for node in joint.nodes if node in reached]
    experts = [node for node in forward if node.target is torch.ops.memfine.experts.default]
    order = {node: place for place, node in enumerate(joint.nodes)}
    last_layer = order[experts[-2]] if len(experts) > 1 else -1
    returned = _returned_nodes(joint, num_forward_outputs)
    candidates = [
        (CostlyResult(node.name, _num_bytes(node), flops, order[node] > last_layer, node in returned), order[node])
        for node in forward
        if (flops := _flops(node)) > 0
    ]
    candidates.sort(
        key=lambda candidate: (
            not candidate[0].is_in_last_layer,
            -candidate[0].flops / max(1, candidate[0].num_bytes),
            -candidate[1],
        )
    )
    return [result for result, _ in candidates]


def _forward_outputs(joint: fx.Graph, num_forward_outputs: int) -> list[fx.Node]:
    (results,) = joint.find_nodes(op="output")[0].args
    return [node for node in results[:num_forward_outputs] if isinstance(node, fx.Node)]


def _returned_nodes(joint: fx.Graph, num_forward_outputs: int) -> set[fx.Node]:
    """Forward's outputs, and what they are views of."""
    returned: set[fx.Node] = set()
    pending: list[Any] = list(_forward_outputs(joint, num_forward_outputs))
    while pending:
        node = pending.pop()
        returned.add(node)
        viewed = viewed_arguments(node.target) if isinstance(node.target, OpOverload) else []
        pending += [node.args[place] for place in viewed[:1] if place is not None]
    return returned


def is_attention(node: fx.Node) -> bool:
    """Fused attention: quadratic work in the sequence behind an output of one tensor's size."""
    name = qualified_name(node.target)
    return name.startswith("aten::_scaled_dot_product_") and not name.endswith("_backward")


def must_save(node: fx.Node) -> None:
    """Tag a node, and what is taken out of its results, as never recomputed."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for user in node.users:
        if user.target is operator.getitem:
            user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _flops(node: fx.Node) -> int:
    """FLOPs of a node by torch's own formulas; 0 where it has none (elementwise work, opaque ops)."""
    packet, is_packed = getattr(node.target, "overloadpacket", None), qualified_name(node.target) == LINEAR_4BIT
    if packet not in flop_registry and not is_attention(node) and not is_packed:
        return 0
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), _at_hints)
    if is_packed:
        return int(2 * args[0].numel() * args[5])
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=_at_hints(node)))
    # torch has no formula for the CPU's attention
    query, key, value = (tuple(tensor.shape) for tensor in args[:3])
    return int(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _num_bytes(node: fx.Node) -> int:
    value = _at_hints(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in values if isinstance(tensor, torch.Tensor))


def _at_hints(node: fx.Node) -> Any:
    """The node's value at the sizes of the captured call, without data and without guards."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return type(value)(_concrete(item) for item in value)
    return _concrete(value)


def _concrete(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty([size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def size_hint(size: int | torch.SymInt) -> int:
    """Return a size in the captured call, without a guard on it."""
    if not isinstance(size, torch.SymInt):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


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
