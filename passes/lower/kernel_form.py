"""Kernel form: an expert function that the GPU kernels compute as it stands.

Before:  mm(x, t(gate_up)), split, silu, mul, mul by the routing weight, mm(., t(down)), casts   (one expert, ATen)
After:   KernelForm("halves", (0, 1)): where the matrices stand among the parameters, and how

Steps: walk from the output through casts to the last product; take the routing weight's column off its rows; take
silu(gate) * up apart; find gate and up as the halves of one product of the rows, or as two. None as soon as a step does
not match: nothing is refused, the expert keeps its bodies.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from memfine_fx.runtime.kernels.tables import KernelForm, Layout

__all__ = ["kernel_form"]

aten = torch.ops.aten
_CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_form(graph: fx.Graph, *, has_weight: bool) -> KernelForm | None:
    """The form of (rows, weight if any, *params) -> contribution, weight folded before the last product; or None."""
    rows, *rest = graph.find_nodes(op="placeholder")
    weight = rest.pop(0) if has_weight else None
    down = _product(_result(graph))
    if down is None:
        return None
    activated = _without_weight(down.left, weight)
    halves = None if activated is None else _gated(activated)
    if halves is None:
        return None
    return _form(rows, rest, *halves, down)


class _Product(NamedTuple):
    """left @ matrix, or left @ matrix.T where the matrix is [out,in]."""

    left: fx.Node
    matrix: fx.Node
    is_out_in: bool


def _form(rows: fx.Node, params: list[fx.Node], gate: fx.Node, up: fx.Node, down: _Product) -> KernelForm | None:
    products = _halves(gate, up) or _apart(gate, up)
    if products is None or any(one.left is not rows for one in products):
        return None
    matrices = [one.matrix for one in (*products, down)]
    if len({one.is_out_in for one in (*products, down)}) != 1 or sorted(map(id, matrices)) != sorted(map(id, params)):
        return None
    return KernelForm(_layout(len(products), down.is_out_in), tuple(params.index(matrix) for matrix in matrices))


def _layout(num_projections: int, is_out_in: bool) -> Layout:
    if num_projections == 2:
        return "apart" if is_out_in else "apart_in_out"
    return "halves" if is_out_in else "halves_in_out"


def _result(graph: fx.Graph) -> fx.Node:
    (output,) = graph.find_nodes(op="output")
    value: Any = output.args[0]
    return value[0] if isinstance(value, (tuple, list)) else value  # type: ignore[no-any-return]  # one node


def _uncast(node: fx.Node) -> fx.Node:
    """What a node is before changes between dtypes that the kernels' fp32 epilogues hold."""
    while node.target is aten._to_copy.default and dict(node.kwargs).keys() == {"dtype"}:
        if node.kwargs["dtype"] not in _CAST_DTYPES:
            break
        node = _node(node.args[0])
    return node


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _product(node: fx.Node) -> _Product | None:
    node = _uncast(node)
    if node.target is not aten.mm.default:
        return None
    left, right = map(_node, node.args)
    is_out_in = right.target is aten.t.default
    matrix = _node(right.args[0]) if is_out_in else right
    return _Product(_uncast(left), matrix, is_out_in) if matrix.op == "placeholder" else None


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Both factors of a product of two tensors."""
    node = _uncast(node)
    if node.target is not aten.mul.Tensor or not all(isinstance(factor, fx.Node) for factor in node.args):
        return None
    left, right = map(_node, node.args)
    return _uncast(left), _uncast(right)


def _without_weight(node: fx.Node, weight: fx.Node | None) -> fx.Node | None:
    """The other factor of rows times the routing weight's column."""
    if weight is None:
        return node
    factors = _factors(node) or ()
    others = [other for one, other in zip(factors, reversed(factors), strict=True) if _is_column(one, weight)]
    return others[0] if others else None


def _is_column(node: fx.Node, weight: fx.Node) -> bool:
    is_column = node.target is aten.unsqueeze.default and node.args[1] in (1, -1)
    return is_column and _uncast(_node(node.args[0])) is weight


def _gated(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(gate, up) of silu(gate) * up."""
    factors = _factors(node) or ()
    for one, other in zip(factors, reversed(factors), strict=True):
        if one.target is aten.silu.default:
            return _uncast(_node(one.args[0])), other
    return None


def _halves(gate: fx.Node, up: fx.Node) -> tuple[_Product] | None:
    """The one product of which gate is the first half of the columns and up the second."""
    if gate.target is not operator.getitem or up.target is not operator.getitem:
        return None
    both = _node(gate.args[0])
    if both is not up.args[0] or (gate.args[1], up.args[1]) != (0, 1):
        return None
    if both.target is not aten.split.Tensor or both.args[2:] not in ((1,), (-1,)):
        return None
    whole = _node(both.args[0])
    product = _product(whole)
    is_half = 2 * both.args[1] == whole.meta["val"].shape[1]  # type: ignore[operator]  # a number of columns
    return (product,) if product is not None and is_half else None


def _apart(gate: fx.Node, up: fx.Node) -> tuple[_Product, _Product] | None:
    products = _product(gate), _product(up)
    return products if None not in products else None  # type: ignore[return-value]  # both are products
