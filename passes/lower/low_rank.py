"""Low-rank terms of a weight meet rows factor by factor: x (W + s B A)^T == x W^T + s (x A^T) B^T.

Before:  y = mm(x, t(add(W, mul(mm(B, A), s))))
After:   y = add(mm(x, t(W)), mm(mul(mm(x, t(A)), s), t(B)))

The sum W + s B A is then never made, and its gradient, which has the size of W, is never made either: backward's
matmuls for A and B have r columns (LoRA, arXiv 2106.09685, as it is written for a single linear layer). Numbers that
scale the term meet the r columns, so that neither y nor its gradient is copied to be scaled. Factors are cast to the
rows' dtype; the product of a bf16 base and fp32 adapters is rounded once, where adding the product to the base would
have rounded the adapter to the base's precision.

It pays where the rank is small. Per row the factors cost r (H + F) multiplications, forward, recomputed, and twice in
backward; the sum costs r H F once per expert and chunk, but its gradient H F per row. So at 4 r (H + F) <= H F the
factors are cheaper whatever an expert's rows number; elsewhere the function stays as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from memfine_fx.passes.ops import TRANSPOSES, name_of
from memfine_fx.passes.tracing import add_call, add_cast, is_transpose

__all__ = ["split_low_rank"]

aten = torch.ops.aten


def split_low_rank(expert_fn: fx.GraphModule) -> int:
    """Rewrite a traced expert function in place.

    Args:
        expert_fn: (rows, ...) -> [R,H], ATen with `meta["val"]`.

    Returns:
        How many of its matmuls were split.
    """
    graph = expert_fn.graph
    num_split = 0
    for product in list(graph.nodes):
        if product.target is not aten.mm.default:
            continue
        rows, matrix = product.args
        has_sum = any(node.target is aten.add.Tensor for node in _made_of(matrix))
        if not has_sum or not _products(matrix) or not _pays(matrix):
            continue
        with graph.inserting_before(product):
            terms = _Product(graph, rows).with_matrix(matrix, is_turned=False)
        product.replace_all_uses_with(terms)
        num_split += 1
    if num_split:
        graph.eliminate_dead_code()
        expert_fn.recompile()
    return num_split


def _products(matrix: fx.Node) -> list[fx.Node]:
    return [node for node in _made_of(matrix) if node.target is aten.mm.default]


def _made_of(matrix: fx.Node) -> list[fx.Node]:
    """A matrix and the nodes that `_Product` looks behind."""
    nodes, pending = [], [matrix]
    while pending:
        node = pending.pop()
        nodes.append(node)
        if _is_looked_behind(node) and node.target is not aten.mm.default:
            pending.extend(source for source in node.all_input_nodes if _is_matrix(source))
    return nodes


def _is_looked_behind(node: fx.Node) -> bool:
    """Sums, multiples, casts and views of matrices; a matrix may have dimensions of one in front."""
    sources, target = node.all_input_nodes, node.target
    if target is aten.add.Tensor:
        is_plain = len(sources) == 2 and not node.kwargs
        return is_plain and all(_sides(source) == _sides(node) for source in sources)
    if target is aten.mul.Tensor:
        return sum(map(_is_matrix, sources)) == 1 and all(map(_is_number, (a for a in node.args if not _is_matrix(a))))
    if target is aten._to_copy.default:
        return bool(sources[0].meta["val"].dtype.is_floating_point)
    is_view = name_of(node) in TRANSPOSES | {"unsqueeze", "select", "squeeze"}
    return target is aten.mm.default or (is_view and _is_matrix(sources[0]) and _is_matrix(node))


def _sides(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape[-2:])


def _is_matrix(argument: Any) -> bool:
    """[..,a,b] with nothing but ones in front."""
    if not isinstance(argument, fx.Node) or argument.meta["val"].numel() == 1:
        return False
    shape = argument.meta["val"].shape
    return len(shape) >= 2 and all(size == 1 for size in shape[:-2])


def _is_number(argument: Any) -> bool:
    return not isinstance(argument, fx.Node) or bool(argument.meta["val"].numel() == 1)


def _pays(matrix: fx.Node) -> bool:
    out, width = matrix.meta["val"].shape
    ranks = [product.args[1].meta["val"].shape[0] for product in _products(matrix)]  # type: ignore[union-attr]
    return bool(4 * sum(ranks) * (out + width) <= out * width)


class _Product:
    """Calls that multiply `rows` with the terms and factors of a matrix."""

    def __init__(self, graph: fx.Graph, rows: fx.Node) -> None:
        self._graph = graph
        self._call = functools.partial(add_call, graph)
        self._rows = rows

    def with_matrix(self, matrix: fx.Node, *, is_turned: bool, scales: tuple[Any, ...] = ()) -> fx.Node:
        """rows @ matrix, or its transpose, times numbers."""
        if not _is_looked_behind(matrix):
            return self._scaled(self._call(aten.mm.default, self._rows, self._factor(matrix, is_turned)), scales)
        source = matrix.all_input_nodes[0]
        if matrix.target not in (aten.add.Tensor, aten.mul.Tensor, aten.mm.default):  # a cast or a view
            return self.with_matrix(source, is_turned=is_turned ^ is_transpose(matrix), scales=scales)
        if matrix.target is aten.add.Tensor:
            left, right = (
                self.with_matrix(term, is_turned=is_turned, scales=scales) for term in matrix.all_input_nodes
            )
            return self._call(aten.add.Tensor, left, right)
        if matrix.target is aten.mul.Tensor:
            inner, scale = matrix.args if _is_matrix(matrix.args[0]) else matrix.args[::-1]
            assert isinstance(inner, fx.Node)
            return self.with_matrix(inner, is_turned=is_turned, scales=(*scales, scale))
        # rows (B A)^T is (rows A^T) B^T: turned factors meet the rows in the other order.
        first, second = matrix.args if not is_turned else matrix.args[::-1]
        narrow = self._call(aten.mm.default, self._rows, self._factor(first, is_turned))  # type: ignore[arg-type]
        narrow = self._scaled(narrow, scales)
        return self._call(aten.mm.default, narrow, self._factor(second, is_turned))  # type: ignore[arg-type]  # nodes

    def _scaled(self, product: fx.Node, scales: tuple[Any, ...]) -> fx.Node:
        for scale in scales:
            if isinstance(scale, fx.Node):
                scale = add_cast(self._graph, self._call(aten.view.default, scale, []), product.meta["val"].dtype)
            product = self._call(aten.mul.Tensor, product, scale)
        return product

    def _factor(self, matrix: fx.Node, is_turned: bool) -> fx.Node:
        """A factor in the rows' dtype, turned if asked."""
        dtype = self._rows.meta["val"].dtype
        while matrix.meta["val"].ndim > 2:
            matrix = self._call(aten.select.int, matrix, 0, 0)
        matrix = add_cast(self._graph, matrix, dtype)
        return self._call(aten.t.default, matrix) if is_turned else matrix
