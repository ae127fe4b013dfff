"""Parts: one entry, several side by side, all experts' rows taken apart by their counts and put together again.

Along experts or choices an entry is about one of them; what all experts give, in order, is one expression again.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch

from memfine_fx.errors import Reason
from memfine_fx.passes.dataflow import same_size, static_size
from memfine_fx.passes.read.leads import Lead
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.rules.moves import dropped, static, still_combined
from memfine_fx.passes.read.rules.pointwise import (
    Operand,
    align,
    along_dim,
    along_routed,
    expression_of,
    inner_dim,
    joint_copy,
)
from memfine_fx.passes.read.values import (
    ALL,
    Combined,
    Coordinates,
    Copy,
    Counts,
    Fill,
    Ids,
    Leaf,
    Mask,
    Rows,
    is_dispatched,
)

__all__ = ["RULES"]

aten = torch.ops.aten


def _select(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """One entry: of a table, of all experts' results or masks, of a token's choices, of places, inside a row."""
    value, place = args[0], args[2]
    dim = args[1] % call.args[0].ndim
    if isinstance(value, Combined):
        return still_combined(reader, call, value)
    if isinstance(value, Fill):
        return value
    if isinstance(value, Counts) and type(place) is int:
        return replace(value, expert=place)
    if isinstance(value, Coordinates) and dim == 1:
        return Ids(value.names[place], Lead.SORTED, copy=value.copy)
    if isinstance(value, Leaf):
        entry = reader.entry(value, place, call) if dim == 0 and type(place) is int else None
        if entry is not None:
            return entry
        value = (reader.as_weights(value) if dim == call.args[0].ndim - 1 else None) or reader.as_rows(value, call)
    if isinstance(value, (Ids, Mask, Rows)) and dim < value.lead.num_dims:
        return _one_of(reader, call, value, dim, place)
    return along_dim(1)(reader, call, args, kwargs)


def _one_of(reader: Reader, call: Call, value: Any, dim: int, place: Any) -> Any:
    """Entry `place` along a dimension of the lead: what it is about."""
    group = value.lead.groups[dim]
    if not group or group == "entry":
        return dropped(reader, value, dim)
    if type(place) is not int or group not in ("e", "k"):
        raise along_routed(dim, call)
    copy = _about(value.copy, group, place % static(call.shape()[dim], call), call)
    return replace(value, lead=value.lead.without(dim), copy=copy)


def _about(copy: Copy, group: str, place: int, call: Call) -> Copy:
    # A dimension of experts in what is one expert's would be another table's.
    known = copy.expert if group == "e" else copy.choice
    if known is not None:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "one entry of what is about one expert already")
    return replace(copy, expert=place) if group == "e" else replace(copy, choice=place)


def _slice(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """A slice that takes all, or one entry; of a mask the first experts; inside a row any."""
    value, source, target = args[0], call.shape(), call.out.shape
    is_forward = len(args) < 5 or args[4] == 1
    if is_forward and len(source) == len(target) and all(map(same_size, source, target)):
        return value
    dim = call.argument(1, "dim", 0) % len(source)
    start = call.argument(2, "start", 0) or 0
    if isinstance(value, Fill):
        return value
    if isinstance(value, Leaf) and dim == len(source) - 1:
        value = reader.as_weights(value) or value
    if isinstance(value, (Ids, Mask, Rows)) and dim < value.lead.num_dims:
        group = value.lead.groups[dim]
        is_one = static_size(target[dim]) == 1 and type(start) is int and is_forward
        if is_one and group in ("e", "k"):
            copy = _about(value.copy, group, start % static(source[dim], call), call)
            return replace(value, lead=value.lead.with_group(dim, ""), copy=copy)
        if isinstance(value, Mask) and group == "e" and start == 0 and is_forward:
            return value  # what names the others is never read
        raise along_routed(dim, call)
    return along_dim(1, default=0)(reader, call, args, kwargs)


def _split(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Take apart: by the experts' counts, entry by entry along experts or choices, or inside a row."""
    value, num_parts = args[0], len(call.out)
    dim = call.argument(1 if call.target is aten.unbind.int else 2, "dim", 0) % call.args[0].ndim
    if isinstance(value, Coordinates) and dim == 1 and call.target is aten.unbind.int:
        return [Ids(name, Lead.SORTED, copy=value.copy) for name in value.names]
    if isinstance(value, Fill):
        return [value] * num_parts
    if isinstance(value, Leaf):
        value = _parted_leaf(reader, call, value, dim)
        if isinstance(value, list):
            return value
    if isinstance(value, (Ids, Mask, Rows)) and dim < value.lead.num_dims:
        return _parts_of_lead(reader, call, value, dim)
    rows = reader.as_rows(value, call)
    if dim < rows.lead.num_dims:
        return _parts_of_lead(reader, call, rows, dim)
    whole = along_dim(1 if call.target is aten.unbind.int else 2, default=0)(reader, call, (rows, *args[1:]), kwargs)
    return [replace(whole, expr=reader.emit(operator.getitem, whole.expr, place)) for place in range(num_parts)]


def _parted_leaf(reader: Reader, call: Call, value: Leaf, dim: int) -> Any:
    if dim == 0 and call.target is aten.unbind.int:
        entries = [reader.entry(value, place, call) for place in range(len(call.out))]
        if all(entry is not None for entry in entries):
            return entries
    is_last = dim == call.args[0].ndim - 1
    return (reader.as_weights(value) if is_last else None) or value


def _parts_of_lead(reader: Reader, call: Call, value: Any, dim: int) -> list[Any]:
    group = value.lead.groups[dim]
    if group in ("e", "k"):
        is_unbound = call.target is aten.unbind.int
        if not is_unbound and not all(static_size(part.shape[dim]) == 1 for part in call.out):
            raise call.refused(Reason.ROWS_NOT_FOLLOWED, "several experts' rows are taken at once")
        lead = value.lead.without(dim) if is_unbound else value.lead.with_group(dim, "")
        return [
            replace(value, lead=lead, copy=_about(value.copy, group, place, call)) for place in range(len(call.out))
        ]
    sizes = call.args[1] if call.target is aten.split_with_sizes.default else ()
    if not reader.are_counts(sizes):
        raise along_routed(dim, call)
    if value.lead is not Lead.SORTED or not value.copy.is_all:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED,
            f"split by the experts' counts, but rows are {value.lead.in_words}, not sorted by expert",
        )
    return [replace(value, copy=replace(value.copy, expert=place)) for place in range(len(call.out))]


def _cat(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Put together: all experts' rows in expert order, all experts' results side by side, or inside a row."""
    values = list(args[0])
    dim = call.argument(1, "dim", 0) % call.ndim
    if values and all(isinstance(value, Fill) for value in values):
        return values[0] if len(set(values)) == 1 else Fill(None)
    if all(isinstance(value, Ids) for value in values):
        return _all_places(values, dim, call)
    rows = [reader.as_rows(value, call) for value in values]
    is_stack = call.target is aten.stack.default
    leads = {value.lead for value in rows}
    if len(leads) == 1 and len(rows) > 1:
        lead = rows[0].lead
        if not is_stack and lead is Lead.SORTED and dim == 0 and all(value.copy.expert is not None for value in rows):
            return _sorted_rows(reader, rows, call)
        takes_new_dim = dim <= lead.num_dims if is_stack else dim < lead.num_dims and not lead.groups[dim]
        if takes_new_dim and lead.num_dims and reader.is_all_tokens(lead) | _is_slots(lead):
            return _side_by_side(reader, rows, dim, is_stack, call)
    if is_stack:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "rows are stacked beside each other")
    return _joined(reader, call, rows, dim)


def _is_slots(lead: Lead) -> bool:
    return any(atom.isdigit() for atom in lead.atoms)


def _all_places(places: list[Any], dim: int, call: Call) -> Ids:
    """The places of all experts, one behind the other."""
    first = places[0]
    # In any other order the list is no expert order, though every place is there.
    in_order = [place.copy.expert for place in places] == list(range(len(places)))
    same = {(place.names, place.lead, place.copy.choice, place.copy.order) for place in places}
    if not in_order or len(same) > 1 or first.lead is not Lead.SORTED or first.copy.choice is not None or dim:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "an index concatenated of other than all experts' places in order")
    return Ids(first.names, first.lead, first.is_iota, Copy(order=first.copy.order))


def _sorted_rows(reader: Reader, rows: list[Rows], call: Call) -> Rows:
    experts = [value.copy.expert for value in rows]
    orders, choices = {value.copy.order for value in rows}, {value.copy.choice for value in rows}
    # Rows of one expert in token order beside those of another in choice order have no common inverse.
    if len(orders) > 1 or choices != {None}:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "experts' results stand in different orders")
    if experts != list(range(len(rows))):
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, "experts' results are concatenated in another order than that of their rows"
        )
    copies = [Copy(expert) for expert in range(len(rows))]
    expr = reader.expressions.unify(copies, [expression_of(value, call) for value in rows], call.node)
    reader.check_num_experts(len(rows), call)
    return Rows(Lead.SORTED, expr, copy=Copy(order=orders.pop()), is_dispatched=True)


def _side_by_side(reader: Reader, rows: list[Rows], dim: int, is_stack: bool, call: Call) -> Rows:
    """[T,...] of every expert as [T,E,...]."""
    experts = [value.copy.expert for value in rows]
    if experts != list(range(len(rows))) and any(expert is not None for expert in experts):
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, "experts' results are put side by side in another order than that of the experts"
        )
    # Unequal results side by side are experts only if their expressions agree up to parameters.
    copies = [Copy(expert) for expert in range(len(rows))]
    lead = rows[0].lead.inserting(dim, "e") if is_stack else rows[0].lead.with_group(dim, "e")
    off = 0.0 if all(value.off == 0 for value in rows) else None
    if all(value.expr is None for value in rows):
        same_off = {value.off for value in rows}
        return Rows(lead, None, off=same_off.pop() if len(same_off) == 1 else None)
    expr = reader.expressions.unify(copies, [expression_of(value, call) for value in rows], call.node)
    reader.check_num_experts(len(rows), call)
    dispatched = any(map(is_dispatched, rows)) or len(set(rows)) > 1
    if dispatched:
        reader.note_experts(call, "loops")
    return Rows(lead, expr, rows[0].per_row, off, ALL, dispatched)


def _joined(reader: Reader, call: Call, rows: list[Rows], dim: int) -> Rows:
    operands = [Operand(value, tensor) for value, tensor in zip(rows, call.args[0], strict=True)]
    # A parameter's expression has one row, which `cat` would not broadcast.
    if len({value.per_row for value in rows}) > 1:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "rows and parameters concatenated")
    lead, expressions = align(reader, operands, call.ndim, call)
    inner = inner_dim(Rows(lead, expressions[0]), dim, call.ndim, call)
    off = 0.0 if all(value.off == 0 for value in rows) else None
    expr = reader.emit(aten.cat.default, expressions, inner)
    return Rows(lead, expr, rows[0].per_row, off, joint_copy(rows, lead, call), any(map(is_dispatched, rows)))


RULES: dict[Any, Rule] = {
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _split,
    aten.cat.default: _cat,
    aten.stack.default: _cat,
}
