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
from memfine_fx.passes.read.dim_labels import DimLabels
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
    joint_iteration,
)
from memfine_fx.passes.read.values import (
    ALL,
    Combined,
    Coordinates,
    Counts,
    Fill,
    Ids,
    Leaf,
    LoopIteration,
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
        return Ids(value.names[place], DimLabels.SORTED, iteration=value.iteration)
    if isinstance(value, Leaf):
        entry = reader.entry(value, place, call) if dim == 0 and type(place) is int else None
        if entry is not None:
            return entry
        value = (reader.as_weights(value) if dim == call.args[0].ndim - 1 else None) or reader.as_rows(value, call)
    if isinstance(value, (Ids, Mask, Rows)) and dim < value.labels.num_dims:
        return _one_of(reader, call, value, dim, place)
    return along_dim(1)(reader, call, args, kwargs)


def _one_of(reader: Reader, call: Call, value: Any, dim: int, place: Any) -> Any:
    """Entry `place` along a dimension of the labels: what it is about."""
    group = value.labels.groups[dim]
    if not group or group == "entry":
        return dropped(reader, value, dim)
    if type(place) is not int or group not in ("e", "k"):
        raise along_routed(dim, call)
    iteration = _about(value.iteration, group, place % static(call.shape()[dim], call), call)
    return replace(value, labels=value.labels.without(dim), iteration=iteration)


def _about(iteration: LoopIteration, group: str, place: int, call: Call) -> LoopIteration:
    # A dimension of experts in what is one expert's would be another table's.
    known = iteration.expert if group == "e" else iteration.choice
    if known is not None:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "one entry of what is about one expert already")
    return replace(iteration, expert=place) if group == "e" else replace(iteration, choice=place)


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
    if isinstance(value, (Ids, Mask, Rows)) and dim < value.labels.num_dims:
        group = value.labels.groups[dim]
        is_one = static_size(target[dim]) == 1 and type(start) is int and is_forward
        if is_one and group in ("e", "k"):
            iteration = _about(value.iteration, group, start % static(source[dim], call), call)
            return replace(value, labels=value.labels.with_group(dim, ""), iteration=iteration)
        if isinstance(value, Mask) and group == "e" and start == 0 and is_forward:
            return value  # what names the others is never read
        raise along_routed(dim, call)
    return along_dim(1, default=0)(reader, call, args, kwargs)


def _split(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Take apart: by the experts' counts, entry by entry along experts or choices, or inside a row."""
    value, num_parts = args[0], len(call.out)
    dim = call.argument(1 if call.target is aten.unbind.int else 2, "dim", 0) % call.args[0].ndim
    if isinstance(value, Coordinates) and dim == 1 and call.target is aten.unbind.int:
        return [Ids(name, DimLabels.SORTED, iteration=value.iteration) for name in value.names]
    if isinstance(value, Fill):
        return [value] * num_parts
    if isinstance(value, Leaf):
        value = _parted_leaf(reader, call, value, dim)
        if isinstance(value, list):
            return value
    if isinstance(value, (Ids, Mask, Rows)) and dim < value.labels.num_dims:
        return _parts_of_labels(reader, call, value, dim)
    rows = reader.as_rows(value, call)
    if dim < rows.labels.num_dims:
        return _parts_of_labels(reader, call, rows, dim)
    whole = along_dim(1 if call.target is aten.unbind.int else 2, default=0)(reader, call, (rows, *args[1:]), kwargs)
    return [replace(whole, expr=reader.emit(operator.getitem, whole.expr, place)) for place in range(num_parts)]


def _parted_leaf(reader: Reader, call: Call, value: Leaf, dim: int) -> Any:
    if dim == 0 and call.target is aten.unbind.int:
        entries = [reader.entry(value, place, call) for place in range(len(call.out))]
        if all(entry is not None for entry in entries):
            return entries
    is_last = dim == call.args[0].ndim - 1
    return (reader.as_weights(value) if is_last else None) or value


def _parts_of_labels(reader: Reader, call: Call, value: Any, dim: int) -> list[Any]:
    group = value.labels.groups[dim]
    if group in ("e", "k"):
        is_unbound = call.target is aten.unbind.int
        if not is_unbound and not all(static_size(part.shape[dim]) == 1 for part in call.out):
            raise call.refused(Reason.ROWS_NOT_FOLLOWED, "several experts' rows are taken at once")
        labels = value.labels.without(dim) if is_unbound else value.labels.with_group(dim, "")
        return [
            replace(value, labels=labels, iteration=_about(value.iteration, group, place, call))
            for place in range(len(call.out))
        ]
    sizes = call.args[1] if call.target is aten.split_with_sizes.default else ()
    if not reader.are_counts(sizes):
        raise along_routed(dim, call)
    if value.labels is not DimLabels.SORTED or not value.iteration.is_all:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED,
            f"split by the experts' counts, but rows are {value.labels.in_words}, not sorted by expert",
        )
    return [replace(value, iteration=replace(value.iteration, expert=place)) for place in range(len(call.out))]


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
    all_labels = {value.labels for value in rows}
    if len(all_labels) == 1 and len(rows) > 1:
        labels = rows[0].labels
        if (
            not is_stack
            and labels is DimLabels.SORTED
            and dim == 0
            and all(value.iteration.expert is not None for value in rows)
        ):
            return _sorted_rows(reader, rows, call)
        takes_new_dim = dim <= labels.num_dims if is_stack else dim < labels.num_dims and not labels.groups[dim]
        if takes_new_dim and labels.num_dims and reader.is_all_tokens(labels) | _is_slots(labels):
            return _side_by_side(reader, rows, dim, is_stack, call)
    if is_stack:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "rows are stacked beside each other")
    return _joined(reader, call, rows, dim)


def _is_slots(labels: DimLabels) -> bool:
    return any(axis.isdigit() for axis in labels.axes)


def _all_places(places: list[Any], dim: int, call: Call) -> Ids:
    """The places of all experts, one behind the other."""
    first = places[0]
    # In any other order the list is no expert order, though every place is there.
    in_order = [place.iteration.expert for place in places] == list(range(len(places)))
    same = {(place.names, place.labels, place.iteration.choice, place.iteration.order) for place in places}
    if (
        not in_order
        or len(same) > 1
        or first.labels is not DimLabels.SORTED
        or first.iteration.choice is not None
        or dim
    ):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "an index concatenated of other than all experts' places in order")
    return Ids(first.names, first.labels, first.is_iota, LoopIteration(order=first.iteration.order))


def _sorted_rows(reader: Reader, rows: list[Rows], call: Call) -> Rows:
    experts = [value.iteration.expert for value in rows]
    orders, choices = {value.iteration.order for value in rows}, {value.iteration.choice for value in rows}
    # Rows of one expert in token order beside those of another in choice order have no common inverse.
    if len(orders) > 1 or choices != {None}:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "experts' results stand in different orders")
    if experts != list(range(len(rows))):
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, "experts' results are concatenated in another order than that of their rows"
        )
    iterations = [LoopIteration(expert) for expert in range(len(rows))]
    expr = reader.expressions.unify(iterations, [expression_of(value, call) for value in rows], call.node)
    reader.check_num_experts(len(rows), call)
    return Rows(DimLabels.SORTED, expr, iteration=LoopIteration(order=orders.pop()), is_dispatched=True)


def _side_by_side(reader: Reader, rows: list[Rows], dim: int, is_stack: bool, call: Call) -> Rows:
    """[T,...] of every expert as [T,E,...]."""
    experts = [value.iteration.expert for value in rows]
    if experts != list(range(len(rows))) and any(expert is not None for expert in experts):
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, "experts' results are put side by side in another order than that of the experts"
        )
    # Unequal results side by side are experts only if their expressions agree up to parameters.
    iterations = [LoopIteration(expert) for expert in range(len(rows))]
    labels = rows[0].labels.inserting(dim, "e") if is_stack else rows[0].labels.with_group(dim, "e")
    fill_value = 0.0 if all(value.fill_value == 0 for value in rows) else None
    if all(value.expr is None for value in rows):
        same_fill_values = {value.fill_value for value in rows}
        return Rows(labels, None, fill_value=same_fill_values.pop() if len(same_fill_values) == 1 else None)
    expr = reader.expressions.unify(iterations, [expression_of(value, call) for value in rows], call.node)
    reader.check_num_experts(len(rows), call)
    dispatched = any(map(is_dispatched, rows)) or len(set(rows)) > 1
    if dispatched:
        reader.note_experts(call, "loops")
    return Rows(labels, expr, rows[0].per_row, fill_value, ALL, dispatched)


def _joined(reader: Reader, call: Call, rows: list[Rows], dim: int) -> Rows:
    operands = [Operand(value, tensor) for value, tensor in zip(rows, call.args[0], strict=True)]
    # A parameter's expression has one row, which `cat` would not broadcast.
    if len({value.per_row for value in rows}) > 1:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "rows and parameters concatenated")
    labels, expressions = align(reader, operands, call.ndim, call)
    inner = inner_dim(Rows(labels, expressions[0]), dim, call.ndim, call)
    fill_value = 0.0 if all(value.fill_value == 0 for value in rows) else None
    expr = reader.emit(aten.cat.default, expressions, inner)
    return Rows(
        labels, expr, rows[0].per_row, fill_value, joint_iteration(rows, labels, call), any(map(is_dispatched, rows))
    )


RULES: dict[Any, Rule] = {
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _split,
    aten.cat.default: _cat,
    aten.stack.default: _cat,
}
