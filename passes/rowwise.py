"""Row-wise proof: per-operation rules under which rows of different assignments never meet.

Each rule takes layouts, checks that the routed dimensions are left alone, and writes the same operation on
one expert's rows. Pointwise operations share one rule, by ATen's own `pointwise` tag; random ones are never
admitted, because a recomputed chunk would draw other numbers. An operation that is not listed has no rule,
which is a refusal.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import same_size, static_size
from memfine_fx.passes.layouts import Combined, Fill, Ids, Lead, Outside, RowInterpreter, Rows, Rule

__all__ = ["ROWWISE_RULES", "pointwise_rule"]

aten = torch.ops.aten


def pointwise_rule(target: Any) -> Rule | None:
    """The shared rule for operations that ATen tags pointwise, or None."""
    is_overload = isinstance(target, torch._ops.OpOverload)
    if not is_overload or torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    return _pointwise


def _pointwise(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out_dims = interpreter.fake(node).ndim
    lead = Lead.NONE
    per_row = False

    def expression(value: Any) -> Any:
        nonlocal lead, per_row
        if isinstance(value, torch.SymInt):
            raise CannotChunk(f"a symbolic number {value} enters row data", node)
        if not isinstance(value, (Rows, Outside, Ids, Fill, Combined)):
            return value
        rows = interpreter.as_rows(value, node)
        lead = _join(interpreter, lead, rows.lead, node)
        per_row = per_row or rows.per_row
        return rows.expr

    values, spec = pytree.tree_flatten((args, kwargs))
    expressions = [expression(value) for value in values]
    for value, source in zip(values, _flat_nodes(node), strict=True):
        _check_broadcast(interpreter, value, source, lead, out_dims, node)
    new_args, new_kwargs = pytree.tree_unflatten(expressions, spec)
    return Rows(lead, interpreter.emit(node.target, *new_args, **new_kwargs), per_row)


def _flat_nodes(node: fx.Node) -> list[Any]:
    return pytree.tree_flatten((node.args, node.kwargs))[0]


def _check_broadcast(
    interpreter: RowInterpreter, value: Any, source: Any, lead: Lead, out_dims: int, node: fx.Node
) -> None:
    """Routed operands must have the result's rank; others must broadcast inside a row."""
    if not isinstance(value, (Rows, Outside)):
        return
    num_dims = interpreter.fake(source).ndim
    is_routed = interpreter.as_rows(value, node).lead is not Lead.NONE
    if is_routed and num_dims != out_dims:
        raise CannotChunk(f"broadcasting a {num_dims}-D routed tensor into {out_dims}-D mixes rows", node)
    if not is_routed and num_dims > out_dims - lead.num_dims and lead is not Lead.NONE:
        raise CannotChunk(f"a tensor that is not routed varies along the routed dimension ({num_dims}-D)", node)


def _join(interpreter: RowInterpreter, left: Lead, right: Lead, node: fx.Node) -> Lead:
    if left is Lead.NONE or left is right:
        return right
    if right is Lead.NONE:
        return left
    if interpreter.sizes.top_k == 1 and {left, right} == {Lead.TOKEN, Lead.FLAT}:
        return Lead.FLAT
    raise CannotChunk(f"rows in different orders meet: {left.value} and {right.value}", node)


def _inner_dim(interpreter: RowInterpreter, rows: Rows, dim: int, num_dims: int, node: fx.Node) -> int:
    """Position in the expression of dimension `dim` of the tensor; the routed ones are off limits."""
    dim = dim + num_dims if dim < 0 else dim
    if rows.lead is Lead.NONE:
        return dim
    if dim < rows.lead.num_dims:
        raise CannotChunk(f"works along the routed dimension {dim}, so rows are not independent", node)
    return dim - rows.lead.num_dims + 1


def _along_dim(position: int, name: str = "dim", default: int | tuple[int, ...] = -1) -> Rule:
    """Rule for an operation along one dimension, given as argument number `position`."""

    def rule(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = interpreter.as_rows(args[0], node)
        num_dims = interpreter.fake(node.args[0]).ndim  # type: ignore[arg-type]  # a node
        dim = args[position] if len(args) > position else kwargs.get(name, default)
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        if not dims or None in dims:
            raise CannotChunk("a reduction over all dimensions mixes rows", node)
        inner = [_inner_dim(interpreter, rows, one, num_dims, node) for one in dims]
        new_args = list(args)
        new_args[0] = rows.expr
        new_kwargs = dict(kwargs)
        mapped = inner if isinstance(dim, (list, tuple)) else inner[0]
        if len(new_args) > position:
            new_args[position] = mapped
        elif name in new_kwargs or mapped != default:
            new_kwargs[name] = mapped
        expr = interpreter.emit(node.target, *new_args, **new_kwargs)
        return Rows(rows.lead, expr, rows.per_row)

    return rule


def _slice(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A slice along an inner dimension; one that takes all rows takes nothing away."""
    source, target = interpreter.fake(node.args[0]), interpreter.fake(node)  # type: ignore[arg-type]  # a node
    is_forward = len(args) < 5 or args[4] == 1
    if is_forward and all(same_size(a, b) for a, b in zip(source.shape, target.shape, strict=True)):
        return args[0]
    return _along_dim(1, default=0)(interpreter, node, args, kwargs)


def _insert_dim(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = interpreter.as_rows(args[0], node)
    num_dims = interpreter.fake(node).ndim
    dim = args[1] + num_dims if args[1] < 0 else args[1]
    inner = _inner_dim(interpreter, rows, dim, num_dims, node)
    return Rows(rows.lead, interpreter.emit(node.target, rows.expr, inner), rows.per_row)


def _reduce(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """sum/mean over inner dimensions; a sum over the choices combines rows into their token."""
    rows = interpreter.as_rows(args[0], node)
    num_dims = interpreter.fake(node.args[0]).ndim  # type: ignore[arg-type]  # a node
    wanted = args[1] if len(args) > 1 else kwargs.get("dim")
    if wanted is None or wanted == []:
        raise CannotChunk("a reduction over all dimensions mixes rows", node)
    dims = [dim % num_dims for dim in (wanted if isinstance(wanted, (list, tuple)) else [wanted])]
    keeps_dim = (args[2] if len(args) > 2 else kwargs.get("keepdim")) or False
    if rows.lead is Lead.CHOICE and dims == [1] and node.target is aten.sum.dim_IntList and not keeps_dim:
        return Combined(_cast(interpreter, rows.expr, kwargs.get("dtype")))
    return _along_dim(1)(interpreter, node, args, kwargs)


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
    return Rows(rows.lead, _cast(interpreter, rows.expr, dtype), rows.per_row)


def _same(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _detach(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], Ids):
        return args[0]
    raise CannotChunk("detach stops gradients inside the region, which a chunk's backward would not", node)


def _view(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape: the routed dimensions stay, or turn between [N] and [T,K]."""
    source = interpreter.fake(node.args[0])  # type: ignore[arg-type]  # a node
    target = interpreter.fake(node)
    if isinstance(args[0], Ids):
        return _view_ids(interpreter, args[0], target, node)
    rows = interpreter.as_rows(args[0], node)
    if rows.lead is Lead.NONE:
        return Rows(Lead.NONE, interpreter.emit(aten.reshape.default, rows.expr, list(target.shape)), False)
    lead = _view_lead(interpreter, rows.lead, source, target, node)
    rest = [_static(size, node) for size in target.shape[lead.num_dims :]]
    if list(source.shape[rows.lead.num_dims :]) == rest:
        return Rows(lead, rows.expr, rows.per_row)
    return Rows(
        lead,
        interpreter.emit(aten.reshape.default, rows.expr, [-1 if rows.per_row else 1, *rest]),
        rows.per_row,
    )


def _view_lead(
    interpreter: RowInterpreter, lead: Lead, source: torch.Tensor, target: torch.Tensor, node: fx.Node
) -> Lead:
    flips = {Lead.FLAT: Lead.CHOICE, Lead.CHOICE: Lead.FLAT}
    candidates = [lead, *([flips[lead]] if lead in flips else [])]
    if lead is Lead.TOKEN and interpreter.sizes.top_k == 1:
        candidates += [Lead.CHOICE]
    for candidate in candidates:
        if _has_lead(interpreter, candidate, target):
            return candidate
    raise CannotChunk(
        f"reshape {tuple(source.shape)} -> {tuple(target.shape)} mixes {lead.value} with other dims", node
    )


def _has_lead(interpreter: RowInterpreter, lead: Lead, target: torch.Tensor) -> bool:
    sizes = interpreter.lead_sizes(lead)
    return target.ndim >= len(sizes) and all(same_size(a, b) for a, b in zip(target.shape, sizes, strict=False))


def _view_ids(interpreter: RowInterpreter, ids: Ids, target: torch.Tensor, node: fx.Node) -> Ids:
    if target.ndim == 0 and same_size(interpreter.sizes.num_rows, 1):
        return ids
    for lead in (ids.lead, Lead.FLAT, Lead.CHOICE):
        is_reachable = lead is ids.lead or ids.lead in (Lead.FLAT, Lead.CHOICE)
        if is_reachable and target.ndim == lead.num_dims and _has_lead(interpreter, lead, target):
            return Ids(ids.kind, lead, ids.is_iota)
    raise CannotChunk(f"index tensor of {ids.kind.value} reshaped to {tuple(target.shape)}", node)


def _static(size: int | torch.SymInt, node: fx.Node) -> int:
    number = static_size(size)
    if number is None:
        raise CannotChunk(f"an inner dimension is symbolic: {size}", node)
    return number


def _expand(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Expand inside a row; [T,1,...] -> [T,K,...] repeats a token for each of its choices."""
    rows = interpreter.as_rows(args[0], node)
    source, target = interpreter.fake(node.args[0]), interpreter.fake(node)  # type: ignore[arg-type]  # a node
    if rows.lead is Lead.NONE or source.ndim != target.ndim:
        raise CannotChunk(f"expand {tuple(source.shape)} -> {tuple(target.shape)} makes routed dimensions", node)
    lead = rows.lead
    expr = rows.expr
    if lead is Lead.TOKEN and source.shape[1] == 1 and interpreter.sizes.top_k > 1 and target.ndim > 2:
        if not same_size(target.shape[1], interpreter.sizes.top_k):
            raise CannotChunk(f"tokens repeated {target.shape[1]} times; expected top-k", node)
        lead, expr = Lead.CHOICE, interpreter.emit(aten.select.int, expr, 1, 0)
        rest_source = source.shape[2:]
    else:
        rest_source = source.shape[lead.num_dims :]
    rest = [_static(size, node) for size in target.shape[lead.num_dims :]]
    if list(rest_source) == rest:
        return Rows(lead, expr, rows.per_row)
    return Rows(lead, interpreter.emit(aten.expand.default, expr, [-1, *rest]), rows.per_row)


def _permute(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = interpreter.as_rows(args[0], node)
    num_dims = interpreter.fake(node).ndim
    order = [dim % num_dims for dim in args[1]]
    num_lead = rows.lead.num_dims
    if order[:num_lead] != list(range(num_lead)):
        raise CannotChunk(f"permute {order} moves the routed dimensions", node)
    if rows.lead is Lead.NONE:
        return Rows(rows.lead, interpreter.emit(node.target, rows.expr, order), False)
    inner = [0, *(dim - num_lead + 1 for dim in order[num_lead:])]
    return Rows(rows.lead, interpreter.emit(node.target, rows.expr, inner), rows.per_row)


def _transpose(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = interpreter.as_rows(args[0], node)
    num_dims = interpreter.fake(node).ndim
    dims = [_inner_dim(interpreter, rows, dim, num_dims, node) for dim in args[1:3]]
    return Rows(rows.lead, interpreter.emit(node.target, rows.expr, *dims), rows.per_row)


def _cat(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = [interpreter.as_rows(value, node) for value in args[0]]
    num_dims = interpreter.fake(node).ndim
    lead = parts[0].lead
    for part in parts[1:]:
        lead = _join(interpreter, lead, part.lead, node)
    if len({part.per_row for part in parts}) > 1:
        raise CannotChunk("rows and parameters concatenated", node)
    dim = _inner_dim(interpreter, parts[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), num_dims, node)
    return Rows(lead, interpreter.emit(node.target, [part.expr for part in parts], dim), parts[0].per_row)


def _split(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = _along_dim(2, default=0)(interpreter, node, args, kwargs)
    return _Parts(rows)


class _Parts:
    """Several tensors made by one call; `getitem` takes one."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows


def _getitem(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], _Parts):
        rows = args[0].rows
        return Rows(rows.lead, interpreter.emit(operator.getitem, rows.expr, args[1]), rows.per_row)
    return args[0][args[1]]


def _shared_matmul(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows times a matrix that all experts share."""
    rows, matrix = (interpreter.as_rows(value, node) for value in args[-2:])
    bias = [interpreter.as_rows(value, node) for value in args[:-2]]
    is_supported = rows.per_row and matrix.lead is Lead.NONE and rows.lead.num_dims == 1 and not kwargs
    if not is_supported or any(value.lead is not Lead.NONE for value in bias):
        raise CannotChunk(f"matmul of {rows.lead.value} by {matrix.lead.value}, or with scaling", node)
    extra = [value.expr for value in bias]
    return Rows(rows.lead, interpreter.emit(node.target, *extra, rows.expr, matrix.expr), True)


ROWWISE_RULES: dict[Any, Rule] = {
    aten._to_copy.default: _to_copy,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _detach,
    aten.lift_fresh_copy.default: _same,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _insert_dim,
    aten.squeeze.dim: _along_dim(1),
    aten.slice.Tensor: _slice,
    aten.select.int: _along_dim(1),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: lambda i, n, a, k: _Parts(_along_dim(1, default=0)(i, n, a, k)),
    aten.cat.default: _cat,
    aten._softmax.default: _along_dim(1),
    aten.softmax.int: _along_dim(1),
    aten.amax.default: _along_dim(1, default=()),
    aten.amin.default: _along_dim(1, default=()),
    aten.cumsum.default: _along_dim(1),
    aten.sum.dim_IntList: _reduce,
    aten.mean.dim: _reduce,
    aten.mm.default: _shared_matmul,
    aten.addmm.default: _shared_matmul,
    operator.getitem: _getitem,
}
