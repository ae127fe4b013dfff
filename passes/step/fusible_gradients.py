"""Sole gradients: results of a region's backward that are the whole gradient of one of the graph's inputs.

Before and after: nothing is rewritten; what is found goes into the graph's record. A run that finds a gradient at such
an input adds to it in place (`runtime.accumulation`), and autograd is handed nothing.

Proof: AOT autograd's joint graph returns one gradient for each of its primals, in their order, and None for one that
wants none. Let a primal's entry be a view of a result, which nothing else reads, of a region's backward, and let the
parameter at that place be a view of the primal. Where one view undoes the other (size, strides and offset are those of
the primal again), this result is all that autograd would add to that input's gradient.

Refused: inputs that are cast or computed with before they reach the experts, inputs that a second use adds to, and
regions whose experts live on several ranks: their backward makes its gradients apart.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.compat.operators import is_view
from memfine_fx.runtime.store import lookup

__all__ = ["fusible_weight_gradients"]

_aten = torch.ops.aten


def fusible_weight_gradients(joint: fx.Graph, num_forward_outputs: int) -> dict[tuple[str, int], int]:
    """(region id, place among the results of its backward) -> place of the primal whose whole gradient that is.

    Args:
        joint: of AOT autograd, before regions save anything.
        num_forward_outputs: results of the joint graph that are forward's.
    """
    primals = [node for node in joint.nodes if node.op == "placeholder" and str(node.target).startswith("primals_")]
    gradients = list(joint.output_node().args[0])[num_forward_outputs:]  # type: ignore[arg-type]  # a tuple of nodes
    if len(gradients) != len(primals):  # tokens of effects among them: no order to rely on
        return {}
    primal_places = {}
    for place, (primal, gradient) in enumerate(zip(primals, gradients, strict=True)):
        key = _key_of(gradient, primal)
        if key is not None and gradients.count(gradient) == 1:
            primal_places[key] = place
    return primal_places


def _key_of(gradient: Any, primal: fx.Node) -> tuple[str, int] | None:
    result = _only_source(gradient)
    if result is None or result.target is not operator.getitem or len(result.users) != 1:
        return None
    backward, place = result.args
    if not isinstance(backward, fx.Node) or backward.target is not torch.ops.memfine.experts_backward.default:
        return None
    params, region_id, wanted = backward.args[5:8]
    if lookup(str(region_id)).exchange is not None:
        return None
    number: Any = place
    number -= sum(wanted[:2])  # type: ignore[index,arg-type]  # of the op's schema, as the next
    wanted_params = [param for param, is_wanted in zip(params, wanted[2:], strict=True) if is_wanted]  # type: ignore[index,arg-type]
    if number < 0 or not _is_undone(primal, wanted_params[number], result, gradient):
        return None
    return str(region_id), int(number + sum(wanted[:2]))  # type: ignore[index,arg-type]


def _only_source(gradient: Any) -> fx.Node | None:
    """Return the node reached from a gradient back through views with one reader each; None if that is no node."""
    node = gradient
    while isinstance(node, fx.Node) and len(node.users) == 1 and is_view(node.target):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _is_undone(primal: fx.Node, param: fx.Node, result: fx.Node, gradient: fx.Node) -> bool:
    """Whether a result's views up to the gradient undo those of the primal up to the parameter."""
    like = primal.meta["val"]
    whole = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    try:
        back = _seen_as(gradient, result, _seen_as(param, primal, whole))
    except _NoView:
        return False
    return (back.shape, back.stride(), back.storage_offset()) == (whole.shape, whole.stride(), 0)


class _NoView(Exception):
    """Something is computed on the way."""


def _seen_as(node: fx.Node, source: fx.Node, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the place of `source`, as `node` sees it."""
    if node is source:
        return tensor
    if not is_view(node.target):
        raise _NoView
    view: Any = node.target
    before: Any = node.args[0]
    viewed: torch.Tensor = view(_seen_as(before, source, tensor), *node.args[1:], **node.kwargs)
    return viewed
