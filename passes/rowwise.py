"""Row-wise proof: per-operation rules under which rows of different assignments never meet.

Each rule takes layouts, checks that the routed dimensions are left alone, and writes the same operation on
one expert's rows. Pointwise operations share one rule, by ATen's own `pointwise` tag; random ones are never
admitted, because a recomputed chunk would draw other numbers. An operation that is not listed has no rule,
which is a refusal.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.operators import OpOverload
from memfine_fx.compat.tensors import tree_flatten, tree_unflatten
from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import same_size
from memfine_fx.passes.layouts import Combined, Fill, Ids, Lead, Outside, RowInterpreter, Rows, Rule
from memfine_fx.passes.leads import join

__all__ = ["ROWWISE_RULES", "Operand", "align", "along_dim", "combine_over", "inner_dim", "pointwise_rule"]

aten = torch.ops.aten


def pointwise_rule(target: Any) -> Rule | None:
    """The shared rule for operations that ATen tags pointwise, or None."""
    is_overload = isinstance(target, OpOverload)
    if not is_overload or torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    return _pointwise


def _pointwise(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = interpreter.fake(node)
    values, spec = tree_flatten((args, kwargs))
    sources = tree_flatten((node.args, node.kwargs))[0]
    operands = _operands(interpreter, values, sources, node)
    lead, expressions = align(interpreter, list(operands.values()), out.ndim, node)
    by_place = dict(zip(operands, expressions, strict=True))
    leaves = [by_place.get(place, _number(value, out, node)) for place, value in enumerate(values)]
    new_args, new_kwargs = tree_unflatten(leaves, spec)
    per_row = any(operand.rows.per_row for operand in operands.values())
    off = _off(node.target, values, spec, operands)
    return Rows(lead, interpreter.emit(node.target, *new_args, **new_kwargs), per_row, off)


@dataclass(frozen=True)
class Operand:
    """Rows that meet others in one operation, and the shape of their tensor."""

    rows: Rows
    shape: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype


def _operands(interpreter: RowInterpreter, values: list[Any], sources: list[Any], node: fx.Node) -> dict[int, Operand]:
    """Row data among the arguments, by place."""
    for value in values:
        if isinstance(value, (Ids, Combined)):
            raise CannotChunk(f"{type(value).__name__.lower()} {value} used as row data", node)
    return {
        place: operand_of(interpreter, interpreter.as_rows(value, node), sources[place])
        for place, value in enumerate(values)
        if isinstance(value, (Rows, Outside))
    }


def operand_of(interpreter: RowInterpreter, rows: Rows, source: fx.Node) -> Operand:
    tensor = interpreter.fake(source)
    return Operand(rows, tuple(tensor.shape), tensor.dtype)


def _number(value: Any, out: torch.Tensor, node: fx.Node) -> Any:
    """An argument that is no row data, as it goes into the expert function."""
    if isinstance(value, torch.SymInt):
        raise CannotChunk(f"a symbolic number {value} enters row data", node)
    if not isinstance(value, Fill):
        return value
    if value.value is None:
        raise CannotChunk("an uninitialised tensor used as row data", node)
    return value.value


def align(
    interpreter: RowInterpreter, operands: Sequence[Operand], out_dims: int, node: fx.Node
) -> tuple[Lead, list[fx.Node]]:
    """Broadcast: the joint lead, and each operand's expression with equally many inner dimensions.

    Raises:
        CannotChunk: rows of different tokens, choices or experts would meet.
    """
    routed = [operand for operand in operands if operand.rows.lead is not Lead.NONE]
    num_lead = max((out_dims - len(one.shape) + one.rows.lead.num_dims for one in routed), default=0)
    lead = Lead(*[""] * num_lead)
    expressions = []
    for operand in operands:
        if operand.rows.lead is Lead.NONE:
            expressions.append(_inner_part(interpreter, operand, out_dims - num_lead if routed else out_dims, node))
            continue
        own, expression = _with_lead_dims(interpreter, operand, num_lead, out_dims, node)
        joint = join(lead, own, interpreter.size_of)
        if joint is None:
            raise CannotChunk(f"rows in different orders meet: {lead.value} and {own.value}", node)
        lead = joint
        expressions.append(expression)
    return lead, expressions


def _with_lead_dims(
    interpreter: RowInterpreter, operand: Operand, num_lead: int, out_dims: int, node: fx.Node
) -> tuple[Lead, fx.Node]:
    """Make dimensions of size one, in front and after the lead, part of it."""
    own, shape, expression = operand.rows.lead, operand.shape, operand.rows.expr
    groups = [""] * (out_dims - len(shape)) + list(own.groups)
    for size in shape[own.num_dims : own.num_dims + num_lead - len(groups)]:
        if not same_size(size, 1):
            raise CannotChunk(
                f"broadcasting {own.value} rows of shape {tuple(shape)} into {out_dims}-D mixes rows", node
            )
        expression = interpreter.emit(aten.select.int, expression, 1, 0)
    return Lead(*groups, *[""] * (num_lead - len(groups))), expression


def _inner_part(interpreter: RowInterpreter, operand: Operand, num_inner: int, node: fx.Node) -> fx.Node:
    """A tensor that is not routed must broadcast inside a row; leading dimensions of one are dropped."""
    expression = operand.rows.expr
    for size in operand.shape[: max(0, len(operand.shape) - num_inner)]:
        if not same_size(size, 1):
            raise CannotChunk(
                f"a tensor that is not routed varies along the routed dimension ({len(operand.shape)}-D)", node
            )
        expression = interpreter.emit(aten.select.int, expression, 0, 0)
    return expression


def _off(target: Any, values: list[Any], spec: Any, operands: dict[int, Operand]) -> float | None:
    """What entries that no choice names become, where that is one known number."""
    known = [
        operands[place].rows.off if place in operands else value.value if isinstance(value, Fill) else value
        for place, value in enumerate(values)
    ]
    if (target is aten.mul.Tensor and 0.0 in known) or (target is aten.div.Tensor and known == [0.0, None]):
        return 0.0  # zero by anything: where that is not finite, the original is not a number either
    if any(value is None for value in known):
        return None
    tensors = [
        torch.tensor(value, dtype=operands[place].dtype) if place in operands else value
        for place, value in enumerate(known)
    ]
    new_args, new_kwargs = tree_unflatten(tensors, spec)
    return float(target(*new_args, **new_kwargs))


def inner_dim(interpreter: RowInterpreter, rows: Rows, dim: int, num_dims: int, node: fx.Node) -> int:
    """Position in the expression of dimension `dim` of the tensor; the routed ones are off limits."""
    dim = dim + num_dims if dim < 0 else dim
    if rows.lead is Lead.NONE:
        return dim
    if dim < rows.lead.num_dims:
        raise CannotChunk(f"works along the routed dimension {dim}, so rows are not independent", node)
    return dim - rows.lead.num_dims + 1


def along_dim(position: int, name: str = "dim", default: int | tuple[int, ...] = -1) -> Rule:
    """Rule for an operation along one dimension, given as argument number `position`."""

    def rule(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = interpreter.as_rows(args[0], node)
        num_dims = interpreter.fake(node.args[0]).ndim  # type: ignore[arg-type]  # a node
        dim = args[position] if len(args) > position else kwargs.get(name, default)
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        if not dims or None in dims:
            raise CannotChunk("a reduction over all dimensions mixes rows", node)
        inner = [inner_dim(interpreter, rows, one, num_dims, node) for one in dims]
        new_args = list(args)
        new_args[0] = rows.expr
        new_kwargs = dict(kwargs)
        mapped = inner if isinstance(dim, (list, tuple)) else inner[0]
        if len(new_args) > position:
            new_args[position] = mapped
        elif name in new_kwargs or mapped != default:
            new_kwargs[name] = mapped
        expr = interpreter.emit(node.target, *new_args, **new_kwargs)
        keeps_zero = rows.off == 0 and node.target in _ZERO_ALONG_DIM
        return Rows(rows.lead, expr, rows.per_row, 0.0 if keeps_zero else None)

    return rule


_ZERO_ALONG_DIM = frozenset(
    {
        aten.sum.dim_IntList, aten.mean.dim, aten.cumsum.default, aten.amax.default, aten.amin.default,
        aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
        aten.glu.default,
    }
)  # fmt: skip


def _reduce(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """sum/mean over inner dimensions; a sum over the choices, or over all experts, combines rows into their token."""
    rows = interpreter.as_rows(args[0], node)
    num_dims = interpreter.fake(node.args[0]).ndim  # type: ignore[arg-type]  # a node
    wanted = args[1] if len(args) > 1 else kwargs.get("dim")
    if wanted is None or wanted == []:
        raise CannotChunk("a reduction over all dimensions mixes rows", node)
    dims = [dim % num_dims for dim in (wanted if isinstance(wanted, (list, tuple)) else [wanted])]
    keeps_dim = (args[2] if len(args) > 2 else kwargs.get("keepdim")) or False
    if node.target is aten.sum.dim_IntList and len(dims) == 1 and dims[0] < rows.lead.num_dims and not keeps_dim:
        return combine_over(rows, dims[0], _cast(interpreter, rows.expr, kwargs.get("dtype")), node)
    return along_dim(1)(interpreter, node, args, kwargs)


def combine_over(rows: Rows, dim: int, expr: fx.Node, node: fx.Node) -> Combined:
    """The sum of rows over dimension `dim` of their lead.

    Raises:
        CannotChunk: it sums over something else than a token's choices, or over experts that it did not choose.
    """
    groups = rows.lead.groups
    if groups[dim] not in ("k", "e") or Lead("".join(groups[:dim] + groups[dim + 1 :])) is not Lead.TOKEN:
        raise CannotChunk(f"works along the routed dimension {dim}, so rows are not independent", node)
    if groups[dim] == "e" and rows.off != 0:
        raise CannotChunk("sum over all experts of results that are not proved zero where a token chose others", node)
    return Combined(expr)


def _cast(interpreter: RowInterpreter, expr: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    return expr if dtype is None else interpreter.emit(aten._to_copy.default, expr, dtype=dtype)


def _to_copy(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = kwargs.get("dtype")
    if isinstance(args[0], Ids):
        is_exact = dtype in (None, torch.float32, torch.float64, torch.int32, torch.int64)
        if not is_exact:
            raise CannotChunk(f"indices cast to {dtype} may not survive", node)
        return args[0]
    rows = interpreter.as_rows(args[0], node)
    return replace(rows, expr=_cast(interpreter, rows.expr, dtype))


def _same(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _detach(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], Ids):
        return args[0]
    raise CannotChunk("detach stops gradients inside the region, which a chunk's backward would not", node)


def _cat(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = [interpreter.as_rows(value, node) for value in args[0]]
    num_dims = interpreter.fake(node).ndim
    sources: Any = node.args[0]
    operands = [operand_of(interpreter, part, source) for part, source in zip(parts, sources, strict=True)]
    if len({part.per_row for part in parts}) > 1:
        raise CannotChunk("rows and parameters concatenated", node)
    lead, expressions = align(interpreter, operands, num_dims, node)
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    inner = inner_dim(interpreter, Rows(lead, expressions[0], parts[0].per_row), dim, num_dims, node)
    off = 0.0 if all(part.off == 0 for part in parts) else None
    return Rows(lead, interpreter.emit(node.target, expressions, inner), parts[0].per_row, off)


def _split(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = along_dim(2, default=0)(interpreter, node, args, kwargs)
    return _Parts(rows)


class _Parts:
    """Several tensors made by one call; `getitem` takes one."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows


def _getitem(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], _Parts):
        rows = args[0].rows
        return replace(rows, expr=interpreter.emit(operator.getitem, rows.expr, args[1]))
    return args[0][args[1]]


def _layer_norm(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Normalisation over the last dimensions; the statistics it also returns are not kept."""
    rows = interpreter.as_rows(args[0], node)
    num_inner = interpreter.fake(node.args[0]).ndim - rows.lead.num_dims  # type: ignore[arg-type]  # a node
    if rows.lead is Lead.NONE or len(args[1]) > num_inner:
        raise CannotChunk("a norm over the routed dimensions mixes rows", node)
    scales = [None if value is None else interpreter.as_rows(value, node) for value in args[2:4]]
    if any(scale is not None and scale.lead is not Lead.NONE for scale in scales):
        raise CannotChunk("a norm whose weight differs between rows", node)
    exprs = [None if scale is None else scale.expr for scale in scales]
    return _Parts(Rows(rows.lead, interpreter.emit(node.target, rows.expr, args[1], *exprs, *args[4:]), rows.per_row))


def _shared_matmul(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows times a matrix that all experts share."""
    rows, matrix = (interpreter.as_rows(value, node) for value in args[-2:])
    bias = [interpreter.as_rows(value, node) for value in args[:-2]]
    is_supported = rows.per_row and matrix.lead is Lead.NONE and rows.lead.num_dims == 1 and not kwargs
    if not is_supported or any(value.lead is not Lead.NONE for value in bias):
        raise CannotChunk(f"matmul of {rows.lead.value} by {matrix.lead.value}, or with scaling", node)
    extra = [value.expr for value in bias]
    off = 0.0 if rows.off == 0 and not bias else None
    return Rows(rows.lead, interpreter.emit(node.target, *extra, rows.expr, matrix.expr), True, off)


ROWWISE_RULES: dict[Any, Rule] = {
    aten._to_copy.default: _to_copy,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _detach,
    aten.lift_fresh_copy.default: _same,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: lambda i, n, a, k: _Parts(along_dim(1, default=0)(i, n, a, k)),
    aten.cat.default: _cat,
    aten._softmax.default: along_dim(1),
    aten.softmax.int: along_dim(1),
    aten.amax.default: along_dim(1, default=()),
    aten.amin.default: along_dim(1, default=()),
    aten.cumsum.default: along_dim(1),
    aten.glu.default: along_dim(1),
    aten.native_layer_norm.default: _layer_norm,
    aten.sum.dim_IntList: _reduce,
    aten.mean.dim: _reduce,
    aten.mm.default: _shared_matmul,
    aten.addmm.default: _shared_matmul,
    operator.getitem: _getitem,
}
