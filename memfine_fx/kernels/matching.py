"""Kernel form: an expert function that the GPU kernels compute as it stands.

Before:  mm(x, t(gate_up)), split, silu, mul, mul by the routing weight, mm(., t(down)), casts   (one expert, ATen)
After:   KernelForm("halves", (0, 1), "swiglu"): where the matrices stand among the parameters, and how

Steps: take the down projection's bias, times the routing weight, off the output; walk through casts to the last
product; take the routing weight's column off its rows; take the activation apart, as one that the kernels know or, of
pointwise operators, as source for them (`epilogue`); find gate and up, with biases or without, as the halves or the
alternating columns of one product of the rows, or as two. A matrix is a parameter, or is dequantized from packed ones
by an operator that the kernels have as source (`kernels.packed`); a low-rank term that meets the rows factor by factor
(`low_rank`) is its adapter, of two more parameters. None where a step does not match: nothing is refused, and the
expert runs in its compiled functions.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from memfine_fx.compat.bitsandbytes import DEQUANTIZE_4BIT
from memfine_fx.compat.operators import qualified_name
from memfine_fx.kernels.adapter_tables import AdapterForm
from memfine_fx.kernels.epilogue import as_pointwise
from memfine_fx.kernels.packed import FP4, NF4, four_bits
from memfine_fx.kernels.tables import Activation, KernelForm, Layout, TileSource

__all__ = ["kernel_form"]

aten = torch.ops.aten
_CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARTS = (operator.getitem, aten.slice.Tensor)
_TO_THE_END = 2**63 - 1
_LIMIT, _SLOPE = 7.0, 1.702  # of GPT-OSS's activation, which the kernels have as constants


def kernel_form(graph: fx.Graph, *, has_weight: bool) -> KernelForm | None:
    """Return the kernel form of (rows, weight if any, *params) -> contribution, or None where it has none.

    The weight is folded in before the last product.
    """
    rows, *params = graph.find_nodes(op="placeholder")
    weight = params.pop(0) if has_weight else None
    result = _result(graph)
    down = _biased_down(result, weight)
    if down is None:
        return None
    activated = _without_weight(down.left, weight)
    if activated is None:
        return None
    for find in (_squared, _by_gate, _clamped, _pointwise):
        gated = find(activated)
        projections = None if gated is None else _projections(gated)
        if gated is not None and projections is not None and _is_one_width(rows, result, gated):
            return _form(rows, params, gated.activation, *projections, down)
    return None


class _Product(NamedTuple):
    """A product left @ matrix + bias and adapter if any, or left @ matrix.T where the matrix is [out,in]."""

    left: fx.Node
    matrix: _Matrix
    is_out_in: bool
    bias: fx.Node | None = None
    adapter: _LowRank | None = None


class _Matrix(NamedTuple):
    """A matrix of the experts: one parameter, or packed parameters and the source that dequantizes them."""

    params: tuple[fx.Node, ...]
    how: TileSource | None = None


class _LowRank(NamedTuple):
    """A low-rank term: the product of two factors with the rows `left` that another product multiplies too."""

    left: fx.Node
    factors: tuple[fx.Node, fx.Node]
    form: AdapterForm


class _Gated(NamedTuple):
    """An activation of gate and up, or of gate alone where the activation has no up."""

    activation: Activation
    gate: fx.Node
    up: fx.Node | None


_How = str  # how gate and up stand in their products: "apart", "halves", "interleaved" or "single"


def _form(
    rows: fx.Node, params: list[fx.Node], activation: Activation, how: _How, products: list[_Product], down: _Product
) -> KernelForm | None:
    every = [*products, down]
    biases = [product.bias for product in every if product.bias is not None]
    adapters = [product.adapter for product in every]
    if len({adapter is None for adapter in adapters[:-1]}) != 1:
        return None
    factors = [factor for adapter in adapters if adapter is not None for factor in adapter.factors]
    used = [*(param for product in every for param in product.matrix.params), *biases, *factors]
    if any(product.left is not rows for product in products) or sorted(map(id, used)) != sorted(map(id, params)):
        return None
    if len({product.is_out_in for product in every}) != 1 or len(biases) not in (0, len(every)):
        return None
    layout = _layout(how, down.is_out_in)
    if layout is None:
        return None
    sources = tuple(product.matrix.how for product in every)
    positions = tuple(map(params.index, used))
    return KernelForm(
        layout, positions, activation, has_bias=bool(biases), sources=sources if any(sources) else (),
        adapters=tuple(None if adapter is None else adapter.form for adapter in adapters) if factors else (),
    )  # fmt: skip


_LAYOUTS: dict[tuple[_How, bool], Layout] = {
    ("apart", True): "apart",
    ("apart", False): "apart_in_out",
    ("halves", True): "halves",
    ("halves", False): "halves_in_out",
    ("interleaved", False): "interleaved_in_out",
    ("single", True): "single",
    ("single", False): "single_in_out",
}


def _layout(how: _How, is_out_in: bool) -> Layout | None:
    return _LAYOUTS.get((how, is_out_in))


def _is_one_width(rows: fx.Node, result: fx.Node, gated: _Gated) -> bool:
    """Return whether the experts return rows of the width they take, and gate and up have the same width."""
    widths = [node.meta["val"].shape[1] for node in (rows, result, gated.gate, gated.up or gated.gate)]
    return bool(widths[0] == widths[1] and widths[2] == widths[3])


def _result(graph: fx.Graph) -> fx.Node:
    (output,) = graph.find_nodes(op="output")
    value: Any = output.args[0]
    return value[0] if isinstance(value, (tuple, list)) else value  # type: ignore[no-any-return]  # one node


def _uncast(node: fx.Node) -> fx.Node:
    """Return the node before casts between dtypes that the kernels' fp32 epilogues hold."""
    while node.target is aten._to_copy.default and dict(node.kwargs).keys() == {"dtype"}:
        if node.kwargs["dtype"] not in _CAST_DTYPES:
            break
        node = _node(node.args[0])
    return node


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _product(node: fx.Node) -> _Product | None:
    """Match a product of a parameter, with a parameter added to every row or without."""
    addends = _operands(node, aten.add.Tensor)
    for addend, other in zip(addends, reversed(addends), strict=True):
        bias = _row(other)
        product = None if bias is None else _bare_product(addend)
        if product is not None and product.bias is None:
            return product._replace(bias=bias)
    return _bare_product(node)


def _bare_product(node: fx.Node) -> _Product | None:
    """Match a product of a parameter, with its adapter's or without."""
    addends = _operands(node, aten.add.Tensor)
    for addend, other in zip(addends, reversed(addends), strict=True):
        product, term = _plain_product(addend), _low_rank(other)
        if product is not None and term is not None and term.left is product.left:
            return product._replace(adapter=term)
    return _plain_product(node)


def _low_rank(node: fx.Node) -> _LowRank | None:
    """Match left @ first @ second, times numbers."""
    wide, scale = _unscaled(node)
    second = None if wide is None else _factor(wide.args[1])
    narrow, inner_scale = _unscaled(_node(wide.args[0])) if wide is not None else (None, 1.0)
    first = None if narrow is None else _factor(narrow.args[1])
    if narrow is None or first is None or second is None:
        return None
    left, rank = _node(narrow.args[0]), int(narrow.meta["val"].shape[1])
    form = AdapterForm(rank, scale * inner_scale, is_first_out_in=first[1], is_second_out_in=second[1])
    return _LowRank(_uncast(left), (first[0], second[0]), form)


def _unscaled(node: fx.Node) -> tuple[fx.Node | None, float]:
    """Return the matrix product that numbers multiply, None where there is none, and the product of the numbers."""
    scale, node = 1.0, _uncast(node)
    while node.target is aten.mul.Tensor and not node.kwargs and isinstance(node.args[1], (int, float)):
        scale *= node.args[1]
        node = _uncast(_node(node.args[0]))
    return (node if node.target is aten.mm.default else None), scale


def _factor(value: Any) -> tuple[fx.Node, bool] | None:
    """Return the parameter that is a factor, and whether it is transposed; None where it is none."""
    node, is_turned = _uncast(_node(value)), False
    while node.target is aten.t.default:
        node, is_turned = _uncast(_node(node.args[0])), not is_turned
    return (node, is_turned) if node.op == "placeholder" and node.meta["val"].ndim == 2 else None


def _plain_product(node: fx.Node) -> _Product | None:
    node = _uncast(node)
    if node.target is aten.addmm.default and not node.kwargs:
        bias, left, right = map(_node, node.args)
        bias = _uncast(bias)
        return _of(left, right, bias) if bias.op == "placeholder" and bias.meta["val"].ndim == 1 else None
    if node.target is not aten.mm.default:
        return None
    left, right = map(_node, node.args)
    return _of(left, right, None)


def _of(left: fx.Node, right: fx.Node, bias: fx.Node | None) -> _Product | None:
    is_out_in = right.target is aten.t.default
    matrix = _matrix(_node(right.args[0]) if is_out_in else right, left.meta["val"].dtype)
    return None if matrix is None else _Product(_uncast(left), matrix, is_out_in, bias)


_CODES = {"nf4": NF4, "fp4": FP4}


def _matrix(node: fx.Node, dtype: torch.dtype) -> _Matrix | None:
    """Match a parameter, or packed numbers that are dequantized to the rows' dtype, as tiles are cast to it."""
    if node.op == "placeholder":
        return _Matrix((node,))
    if qualified_name(node.target) != DEQUANTIZE_4BIT or node.meta["val"].dtype is not dtype:
        return None
    arguments: tuple[Any, ...] = (*node.args, *node.kwargs.values())
    packed, scales, block, quant_type, *_ = arguments
    are_params = all(isinstance(param, fx.Node) and param.op == "placeholder" for param in (packed, scales))
    if not are_params or quant_type not in _CODES or scales.meta["val"].dtype is not torch.float32:
        return None
    rows, columns = node.meta["val"].shape
    how = four_bits((int(rows), int(columns)), block, _CODES[quant_type])
    return _Matrix((packed, scales), how)


def _row(node: fx.Node) -> fx.Node | None:
    """Return the parameter [C] that a node reads as a row [1,C] or as it is; None where it is none."""
    node = _uncast(node)
    if node.target is aten.unsqueeze.default and node.args[1] == 0:
        node = _uncast(_node(node.args[0]))
    return node if node.op == "placeholder" and node.meta["val"].ndim == 1 else None


def _biased_down(node: fx.Node, weight: fx.Node | None) -> _Product | None:
    """Match the last product and its bias, which the folded routing weight multiplies."""
    if weight is None:
        return _product(node)
    addends = _operands(node, aten.add.Tensor)
    for addend, other in zip(addends, reversed(addends), strict=True):
        scaled = _without_weight(other, weight)
        bias = None if scaled is None else _row(scaled)
        product = None if bias is None else _bare_product(addend)
        if product is not None and product.bias is None:
            return product._replace(bias=bias)
    product = _bare_product(node)
    return product if product is not None and product.bias is None else None


def _operands(node: fx.Node, target: Any) -> tuple[fx.Node, ...]:
    """Return both operands of a sum or product of two tensors; an empty tuple for any other node."""
    node = _uncast(node)
    if node.target is not target or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
        return ()
    left, right = map(_node, node.args)
    return _uncast(left), _uncast(right)


def _without_weight(node: fx.Node, weight: fx.Node | None) -> fx.Node | None:
    """Return the other factor of rows times the routing weight's column; None where there is no such product."""
    if weight is None:
        return node
    factors = _operands(node, aten.mul.Tensor)
    others = [other for factor, other in zip(factors, reversed(factors), strict=True) if _is_column(factor, weight)]
    return others[0] if others else None


def _is_column(node: fx.Node, weight: fx.Node) -> bool:
    is_column = node.target is aten.unsqueeze.default and node.args[1] in (1, -1)
    return is_column and _uncast(_node(node.args[0])) is weight


def _pointwise(node: fx.Node) -> _Gated | None:
    """Match pointwise operators of one or two products, or of the parts of one."""
    leaves: list[fx.Node] = []
    waiting, visited = [node], set[fx.Node]()
    while waiting:
        current = _uncast(waiting.pop())
        if current in visited or current.op == "placeholder":
            continue
        visited.add(current)
        if current.target in _PARTS or _product(current) is not None:
            leaves.append(current)
        else:
            waiting.extend(current.all_input_nodes)
    if not 1 <= len(leaves) <= 2:
        return None
    gate, up = leaves[0], leaves[-1]
    if _columns(gate, up) is None and _columns(up, gate) is not None:
        leaves.reverse()
    activation = as_pointwise(node, leaves, _uncast)
    return None if activation is None else _Gated(activation, leaves[0], leaves[1] if activation.has_up else None)


def _squared(node: fx.Node) -> _Gated | None:
    """Match relu(gate) squared."""
    node = _uncast(node)
    factors = _operands(node, aten.mul.Tensor)
    root = factors[0] if factors and factors[0] is factors[1] else None
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        root = _uncast(_node(node.args[0]))
    if root is None or root.target is not aten.relu.default:
        return None
    return _Gated("relu2", _uncast(_node(root.args[0])), None)


def _by_gate(node: fx.Node) -> _Gated | None:
    """Match silu(gate) * up, or gelu(gate) * up."""
    factors = _operands(node, aten.mul.Tensor)
    for factor, other in zip(factors, reversed(factors), strict=True):
        activation = _gate_activation(factor)
        if activation is not None:
            return _Gated(activation, _uncast(_node(factor.args[0])), other)
    return None


def _gate_activation(node: fx.Node) -> Activation | None:
    if node.target is aten.silu.default:
        return "swiglu"
    if node.target is aten.gelu.default:
        is_tanh = node.kwargs.get("approximate", "none") == "tanh" or node.args[1:] == ("tanh",)
        return "geglu" if is_tanh else "geglu_exact"
    return None


def _clamped(node: fx.Node) -> _Gated | None:
    """Match GPT-OSS's activation: (up + 1) * gate * sigmoid(1.702 gate) in any order, both clamped before."""
    factors = _flat_factors(node)
    sigmoids = [factor for factor in factors if factor.target is aten.sigmoid.default]
    sums = [
        factor
        for factor in factors
        if factor.target is aten.add.Tensor and factor.args[1:] == (1,) and not factor.kwargs
    ]
    others = [factor for factor in factors if factor not in sigmoids and factor not in sums]
    if (len(sigmoids), len(sums), len(others)) != (1, 1, 1):
        return None
    slope = _uncast(_node(sigmoids[0].args[0]))
    if slope.target is not aten.mul.Tensor or slope.args[1:] != (_SLOPE,):
        return None
    gate, up = _clamp(others[0], (None, _LIMIT)), _clamp(_uncast(_node(sums[0].args[0])), (-_LIMIT, _LIMIT))
    if gate is None or up is None or _uncast(_node(slope.args[0])) is not others[0]:
        return None
    return _Gated("clamped", gate, up)


def _flat_factors(node: fx.Node) -> list[fx.Node]:
    """Return the factors of a product of products."""
    factors = _operands(node, aten.mul.Tensor)
    return [inner_factor for factor in factors for inner_factor in _flat_factors(factor)] or [_uncast(node)]


def _clamp(node: fx.Node, bounds: tuple[float | None, float]) -> fx.Node | None:
    """Return the input of a clamp between these bounds, or None where the node is none."""
    low, high = (*node.args[1:], None, None)[:2]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    if node.target is aten.clamp_max.default:
        low, high = None, node.args[1]
    elif node.target is not aten.clamp.default:
        return None
    return _uncast(_node(node.args[0])) if (low, high) == bounds else None


def _projections(gated: _Gated) -> tuple[_How, list[_Product]] | None:
    """Return how gate and up stand in their products, and those products; None where they do not match."""
    if gated.up is None:
        single = _product(gated.gate)
        return None if single is None else ("single", [single])
    columns = _columns(gated.gate, gated.up)
    if columns is not None:
        how, whole = columns
        both = _product(whole)
        return None if both is None else (how, [both])
    gate, up = _product(gated.gate), _product(gated.up)
    return None if gate is None or up is None else ("apart", [gate, up])


def _columns(gate: fx.Node, up: fx.Node) -> tuple[_How, fx.Node] | None:
    """Match gate and up as columns of one product: the first half and the second, or even ones and odd ones.

    Returns which of the two, and the product.
    """
    if gate.target is operator.getitem and up.target is operator.getitem:
        return _split(gate, up)
    if gate.target is not aten.slice.Tensor or up.target is not aten.slice.Tensor:
        return None
    whole, other = _every_row(_node(gate.args[0])), _every_row(_node(up.args[0]))
    if whole is not other:
        return None
    size = whole.meta["val"].shape[1]
    ranges = [_range(part, size) for part in (gate, up)]
    if ranges == [range(size // 2), range(size // 2, size)]:
        return "halves", whole
    return ("interleaved", whole) if ranges == [range(0, size, 2), range(1, size, 2)] else None


def _every_row(node: fx.Node) -> fx.Node:
    """Return the input of a slice that takes all rows, as `x[:, ...]` writes one; any other node as it is."""
    is_slice = node.target is aten.slice.Tensor and node.args[1:] in ((), (0,), (0, 0), (0, 0, _TO_THE_END))
    return _node(node.args[0]) if is_slice else node


def _range(node: fx.Node, size: int) -> range | None:
    """Return the columns that a slice takes, or None where it takes no fixed range of columns."""
    arguments: list[Any] = list(node.args[1:])
    defaults: list[Any] = [0, 0, size, 1]
    dim, start, end, step = arguments + defaults[len(arguments) :]
    if dim not in (1, -1) or not all(isinstance(bound, int) for bound in (start, end, step)):
        return None
    return range(size)[start:end:step]


def _split(gate: fx.Node, up: fx.Node) -> tuple[_How, fx.Node] | None:
    both = _node(gate.args[0])
    if both is not up.args[0] or (gate.args[1], up.args[1]) != (0, 1):
        return None
    if both.target is not aten.split.Tensor or both.args[2:] not in ((1,), (-1,)):
        return None
    whole = _node(both.args[0])
    is_half = 2 * both.args[1] == whole.meta["val"].shape[1]  # type: ignore[operator]  # a number of columns
    return ("halves", whole) if is_half else None
