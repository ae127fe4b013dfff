"""Moves: reshape, permute, insert, drop, repeat. They change how rows are laid out, never what a row holds.

A dimension of size one in a lead broadcasts and stays so when it is expanded ("the same for all of them"); only
a reshape that flattens it has to know whether it stood for a token's choices or for the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import same_size, static_size
from memfine_fx.passes.layouts import Combined, Ids, Lead, RowInterpreter, Rows, Rule
from memfine_fx.passes.rowwise import along_dim, inner_dim

__all__ = ["MOVE_RULES"]

aten = torch.ops.aten
Size = int | torch.SymInt


def _shapes(interpreter: RowInterpreter, node: fx.Node) -> tuple[Sequence[Size], Sequence[Size]]:
    """Shapes of the first argument and of the result."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return interpreter.fake(source).shape, interpreter.fake(node).shape


def _unless_combined(rule: Rule) -> Rule:
    """Combined tokens keep their value under moves that only add or drop dimensions of size one."""

    def checked(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(args[0], Combined):
            return rule(interpreter, node, args, kwargs)
        before, after = ([size for size in shape if not same_size(size, 1)] for shape in _shapes(interpreter, node))
        is_same = len(before) == len(after) and all(same_size(a, b) for a, b in zip(before, after, strict=True))
        tokens = interpreter.regroup(Lead.TOKEN, after)
        if not is_same and (tokens is None or tokens.num_dims != len(after) - 1):
            raise CannotChunk("combined tokens are reshaped before they leave the region", node)
        return args[0]

    return checked


def _view(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape: atoms of the lead regroup, [N] to [T,K] and the like."""
    source, target = _shapes(interpreter, node)
    if isinstance(args[0], Ids):
        return replace(args[0], lead=_ids_lead(interpreter, args[0], source, target, node))
    rows = interpreter.as_rows(args[0], node)
    if rows.lead is Lead.NONE:
        return Rows(Lead.NONE, interpreter.emit(aten.reshape.default, rows.expr, list(target)), False)
    lead = _view_lead(interpreter, rows.lead, source, target, node)
    rest = [_static(size, node) for size in target[lead.num_dims :]]
    if list(source[rows.lead.num_dims :]) == rest:
        return replace(rows, lead=lead)
    shape = [-1 if rows.per_row else 1, *rest]
    return replace(rows, lead=lead, expr=interpreter.emit(aten.reshape.default, rows.expr, shape))


def _view_lead(
    interpreter: RowInterpreter, lead: Lead, source: Sequence[Size], target: Sequence[Size], node: fx.Node
) -> Lead:
    if _is_untouched(lead, source, target):
        return lead
    regrouped = interpreter.regroup(_named(interpreter, lead, source), target)
    if regrouped is None:
        raise CannotChunk(f"reshape {tuple(source)} -> {tuple(target)} mixes {lead.value} with other dims", node)
    return regrouped


def _is_untouched(lead: Lead, source: Sequence[Size], target: Sequence[Size]) -> bool:
    """Whether a reshape leaves the dimensions of the lead alone."""
    leading = list(zip(source, target, strict=False))[: lead.num_dims]
    return len(leading) == lead.num_dims and all(same_size(a, b) for a, b in leading)


def _named(interpreter: RowInterpreter, lead: Lead, source: Sequence[Size]) -> Lead:
    """The lead with a name for each dimension that was expanded."""
    groups = list(lead.groups)
    for place, group in enumerate(groups):
        if not group and not same_size(source[place], 1):
            groups[place] = _repeated_atom(interpreter, source[place], is_first=place == 0) or "?"
    return Lead(*groups)


def _repeated_atom(interpreter: RowInterpreter, count: Size, *, is_first: bool) -> str | None:
    """What tokens repeated `count` times stand for; in front of the tokens experts are likelier than choices."""
    sizes = {"k": interpreter.sizes.top_k, "e": interpreter.num_experts}
    for atom in "ek" if is_first else "ke":
        size = sizes[atom]
        if size is not None and same_size(count, size):
            return atom
    slots = (str(dim) for dim, size in enumerate(interpreter.slot_sizes) if same_size(count, size))
    return next(slots, None)


def _ids_lead(
    interpreter: RowInterpreter, ids: Ids, source: Sequence[Size], target: Sequence[Size], node: fx.Node
) -> Lead:
    if not target and same_size(interpreter.sizes.num_rows, 1):
        return ids.lead
    is_untouched = _is_untouched(ids.lead, source, target)
    lead = ids.lead if is_untouched else interpreter.regroup(_named(interpreter, ids.lead, source), target)
    trailing = () if lead is None else target[lead.num_dims :]
    if lead is None or not all(same_size(size, 1) for size in trailing):
        raise CannotChunk(f"index tensor of {ids.kind.value} reshaped to {tuple(target)}", node)
    return Lead(*lead.groups, *[""] * len(trailing))


def _static(size: Size, node: fx.Node) -> int:
    number = static_size(size)
    if number is None:
        raise CannotChunk(f"an inner dimension is symbolic: {size}", node)
    return number


def _expand(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Expand inside a row; [T,1,...] -> [T,K,...] repeats a token for each of its choices (or experts)."""
    source, target = _shapes(interpreter, node)
    if isinstance(args[0], Ids):
        if len(source) != len(target):
            raise CannotChunk("an index expanded to more dimensions", node)
        return args[0]
    rows = interpreter.as_rows(args[0], node)
    if rows.lead is Lead.NONE:
        return Rows(Lead.NONE, interpreter.emit(aten.expand.default, rows.expr, list(target)), False)
    lead, expr = Lead(*[""] * (len(target) - len(source)), *rows.lead.groups), rows.expr
    first = len(target) - len(source) + rows.lead.num_dims
    repeats_tokens = Lead(rows.lead.atoms) is Lead.TOKEN and len(source) > rows.lead.num_dims + 1
    if repeats_tokens and same_size(source[rows.lead.num_dims], 1) and not same_size(target[first], 1):
        lead, expr = Lead(*lead.groups, ""), interpreter.emit(aten.select.int, expr, 1, 0)
        source = [*source[: rows.lead.num_dims], *source[rows.lead.num_dims + 1 :]]
    rest = [_static(size, node) for size in target[lead.num_dims :]]
    if list(source[rows.lead.num_dims :]) == rest:
        return replace(rows, lead=lead, expr=expr)
    return replace(rows, lead=lead, expr=interpreter.emit(aten.expand.default, expr, [-1, *rest]))


def _repeat(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tokens repeated for every expert, [T,H] -> [E*T,H] or [E,T,H]."""
    rows = interpreter.as_rows(args[0], node)
    source, _ = _shapes(interpreter, node)
    num_new = len(args[1]) - len(source)
    groups = [""] * num_new + list(rows.lead.groups)
    counts, inner = args[1][: len(groups)], args[1][len(groups) :]
    if rows.lead is Lead.NONE or any(count != 1 for count in inner):
        raise CannotChunk(f"repeat {args[1]} other than of whole rows", node)
    for place, count in enumerate(counts):
        if same_size(count, 1) or not groups[place]:
            continue
        atom = _repeated_atom(interpreter, count, is_first=True)
        if atom is None or atom in rows.lead.atoms:
            raise CannotChunk(f"rows repeated {count} times, neither top-k nor the number of experts", node)
        groups[place] = atom + groups[place]
    return replace(rows, lead=Lead(*groups))


def _permute(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    num_dims = len(args[1])
    return _reordered(interpreter, args[0], [dim % num_dims for dim in args[1]], node)


def _transpose(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = list(range(interpreter.fake(node).ndim))
    left, right = args[1], args[2]
    order[left], order[right] = order[right], order[left]
    return _reordered(interpreter, args[0], order, node)


def _t(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _reordered(interpreter, args[0], [1, 0][: interpreter.fake(node).ndim], node)


def _reordered(interpreter: RowInterpreter, value: Any, order: list[int], node: fx.Node) -> Any:
    is_index = isinstance(value, Ids)
    rows = value if is_index else interpreter.as_rows(value, node)
    num_lead = rows.lead.num_dims
    if sorted(order[:num_lead]) != list(range(num_lead)):
        raise CannotChunk(f"permute {order} moves the routed dimensions", node)
    lead = Lead(*(rows.lead.groups[dim] for dim in order[:num_lead]))
    if is_index:
        return replace(rows, lead=lead)
    if rows.lead is Lead.NONE:
        return Rows(Lead.NONE, interpreter.emit(aten.permute.default, rows.expr, order), False)
    inner = [0, *(dim - num_lead + 1 for dim in order[num_lead:])]
    if inner == sorted(inner):
        return replace(rows, lead=lead)
    return replace(rows, lead=lead, expr=_permuted(interpreter, rows, inner))


def _permuted(interpreter: RowInterpreter, rows: Rows, inner: list[int]) -> fx.Node:
    """The permuted expression; a parameter is permuted before the row dimension is put in front of it."""
    if rows.expr.target is not aten.unsqueeze.default or rows.per_row or rows.expr.args[1] != 0:
        return interpreter.emit(aten.permute.default, rows.expr, inner)
    permuted = interpreter.emit(aten.permute.default, rows.expr.args[0], [dim - 1 for dim in inner[1:]])
    return interpreter.emit(aten.unsqueeze.default, permuted, 0)


def _insert_dim(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    num_dims = interpreter.fake(node).ndim
    dim = args[1] + num_dims if args[1] < 0 else args[1]
    is_index = isinstance(args[0], Ids)
    rows = args[0] if is_index else interpreter.as_rows(args[0], node)
    groups = rows.lead.groups
    if is_index or dim < len(groups):
        return replace(rows, lead=Lead(*groups[:dim], "", *groups[dim:]))
    inner = inner_dim(interpreter, rows, dim, num_dims, node)
    return replace(rows, expr=interpreter.emit(aten.unsqueeze.default, rows.expr, inner))


def _squeeze(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dims = list(args[1]) if isinstance(args[1], (list, tuple)) else [args[1]]
    source, target = _shapes(interpreter, node)
    value = args[0] if isinstance(args[0], Ids) else interpreter.as_rows(args[0], node)
    if len(source) == len(target):
        return value
    for dim in sorted((dim % len(source) for dim in dims), reverse=True):
        if same_size(source[dim], 1):
            value = _dropped(interpreter, value, dim)
    return value


def _dropped(interpreter: RowInterpreter, value: Any, dim: int) -> Any:
    """`value` without its dimension `dim` of size one; an atom of that size goes to its neighbour."""
    groups = list(value.lead.groups)
    if dim >= len(groups):
        inner = dim - len(groups) + 1 if groups else dim
        return replace(value, expr=interpreter.emit(aten.select.int, value.expr, inner, 0))
    atom = groups.pop(dim)
    if atom and groups:
        place = max(0, dim - 1)
        groups[place] = groups[place] + atom if dim else atom + groups[place]
    return replace(value, lead=Lead(*groups))


def _select(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, _ = _shapes(interpreter, node)
    dim = args[1] % len(source)
    if isinstance(args[0], Rows) and dim < args[0].lead.num_dims and not args[0].lead.groups[dim]:
        return _dropped(interpreter, args[0], dim)
    return along_dim(1)(interpreter, node, args, kwargs)


def _slice(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A slice along an inner dimension; one that takes all rows takes nothing away."""
    source, target = _shapes(interpreter, node)
    is_forward = len(args) < 5 or args[4] == 1
    if is_forward and all(same_size(a, b) for a, b in zip(source, target, strict=True)):
        return args[0]
    return along_dim(1, default=0)(interpreter, node, args, kwargs)


MOVE_RULES: dict[Any, Rule] = {
    aten.view.default: _unless_combined(_view),
    aten._unsafe_view.default: _unless_combined(_view),
    aten.reshape.default: _unless_combined(_view),
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unless_combined(_insert_dim),
    aten.squeeze.dim: _unless_combined(_squeeze),
    aten.squeeze.dims: _unless_combined(_squeeze),
    aten.select.int: _unless_combined(_select),
    aten.slice.Tensor: _slice,
}
