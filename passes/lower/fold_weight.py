"""Fold the routing weight before the last projection: (act @ W) * w == (act * w) @ W.

Before:  y = mm(act, W); y = add(y, bias); out = mul(y, unsqueeze(w, 1))
After:   y = mm(act * w, W); out = add(y, bias * w)

Then backward needs neither the last projection's output nor its recomputation: the weight's gradient becomes
a row dot product of tensors that are there anyway (SonicMoE, arXiv 2512.14080; Megatron-Core does the same by
hand). The product with the weight is rounded to the activation's dtype once, as the projection's output was.

Steps: take the output's multiplication by the weight, before a cast or none (autocast sums in fp32); walk from its
other factor through bias additions down to the last matmul; rewrite. Leaves the function alone (returns False) when
any step does not match.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.passes.tracing import add_call, add_cast

__all__ = ["fold_weight"]

aten = torch.ops.aten


def fold_weight(expert_fn: fx.GraphModule, weight: fx.Node) -> bool:
    """Rewrite a traced expert function in place.

    Args:
        expert_fn: (rows, weight, *params) -> [R,H], ATen with `meta["val"]`.
        weight: its placeholder of the routing weight.

    Returns:
        Whether the weight was folded.
    """
    graph = expert_fn.graph
    output = next(iter(reversed(graph.nodes)))
    product = _uncast(_single_result(output))
    if product is None or product.target is not aten.mul.Tensor:
        return False
    factor, column = _split_factors(product, weight)
    if factor is None or column is None:
        return False
    chain = _affine_chain(factor)
    if chain is None:
        return False
    biases, matmul = chain
    with graph.inserting_before(product):
        result = _weighted_matmul(graph, matmul, column)
        for bias in biases:
            scaled = add_call(graph, aten.mul.Tensor, bias, column)
            result = add_call(graph, aten.add.Tensor, result, scaled)
        result = add_cast(graph, result, product.meta["val"].dtype)
    product.replace_all_uses_with(result)
    graph.eliminate_dead_code()
    expert_fn.recompile()
    return True


def _single_result(output: fx.Node) -> fx.Node | None:
    result = output.args[0]
    if isinstance(result, (tuple, list)) and len(result) == 1:
        result = result[0]
    return result if isinstance(result, fx.Node) else None


def _uncast(node: fx.Node | None) -> fx.Node | None:
    """Return the node under its casts: autocast sums in fp32 by such a cast, which stays behind the projection."""
    while node is not None and node.target is aten._to_copy.default and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _split_factors(product: fx.Node, weight: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    left, right = product.args[:2]
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        if _is_column_of(right, weight):
            return left, right
        if _is_column_of(left, weight):
            return right, left
    return None, None


def _is_column_of(node: fx.Node, weight: fx.Node) -> bool:
    """Whether `node` is the weight as a column, cast or not."""
    while node.target in (aten._to_copy.default, aten.unsqueeze.default) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node is weight


def _affine_chain(node: fx.Node) -> tuple[list[fx.Node], fx.Node] | None:
    """(biases, matmul) when `node` is matmul + biases that do not depend on the row."""
    biases: list[fx.Node] = []
    while node.target in (aten.add.Tensor, aten._to_copy.default):
        if node.target is aten._to_copy.default:
            node = _node(node.args[0])
            continue
        # `alpha` scales one side, which the bias below would not.
        if len(node.args) != 2 or node.kwargs:
            return None
        left, right = node.args
        if isinstance(right, fx.Node) and _is_bias(right):
            biases.append(right)
            node = _node(left)
        elif isinstance(left, fx.Node) and _is_bias(left):
            biases.append(left)
            node = _node(right)
        else:
            return None
    return (biases, node) if node.target is aten.mm.default else None


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _is_bias(node: fx.Node) -> bool:
    shape = node.meta["val"].shape
    # What has a row for each row is no bias: scaling it would scale something of the rows twice.
    return len(shape) < 2 or shape[0] == 1


def _weighted_matmul(graph: fx.Graph, matmul: fx.Node, column: fx.Node) -> fx.Node:
    act, matrix = (_node(argument) for argument in matmul.args[:2])
    scaled = add_cast(graph, add_call(graph, aten.mul.Tensor, act, column), act.meta["val"].dtype)
    return add_call(graph, aten.mm.default, scaled, matrix)
