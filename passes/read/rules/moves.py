"""Moves: reshape, permute, insert, drop, repeat. They change how rows are laid out, never
what a row holds.

A labelled dimension of size one broadcasts and stays so when it is expanded ("the same for all of them"); only a
reshape that flattens it has to know whether it stood for a token's choices or for the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import Reason
from memfine_fx.passes.dataflow import same_size, static_size
from memfine_fx.passes.read.dim_labels import DimLabels, Size
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.rules.pointwise import expression_of, inner_dim
from memfine_fx.passes.read.values import (
    Combined,
    Coordinates,
    Counts,
    Fill,
    Ids,
    Leaf,
    Mask,
    Rows,
)

__all__ = ["RULES", "dropped", "static", "still_combined"]

aten = torch.ops.aten


def _view(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Reshape: axes of the labels regroup, [N] to [T,K] and the like."""
    value = args[0]
    source, target = ([reader.known_size(size) for size in shape] for shape in (call.shape(), call.out.shape))
    if isinstance(value, Combined):
        return still_combined(reader, call, value)
    if isinstance(value, Coordinates) and len(value.names) == 1 and len(target) == 1:
        return Ids(value.names[0], DimLabels.SORTED, iteration=value.iteration)
    if isinstance(value, (Fill, Counts)):
        return value
    if isinstance(value, (Ids, Mask)):
        return replace(value, labels=_whole_labels(reader, value, source, target, call))
    rows = reader.as_rows(value, call)
    if rows.labels is DimLabels.NONE:
        return replace(rows, expr=reader.emit(aten.reshape.default, rows.expr, list(target)))
    labels = _view_labels(reader, rows.labels, source, target, call)
    rest = [static(size, call) for size in target[labels.num_dims :]]
    # Only the labels are regrouped, and an expression is about one row, which keeps its shape.
    if rows.expr is None or list(source[rows.labels.num_dims :]) == rest:
        return replace(rows, labels=labels)
    shape = [-1 if rows.per_row else 1, *rest]
    return replace(rows, labels=labels, expr=reader.emit(aten.reshape.default, rows.expr, shape))


def still_combined(reader: Reader, call: Call, value: Combined) -> Combined:
    """Combined tokens stay what they are where only dimensions of one come or go, or tokens are flattened."""
    known = ([reader.known_size(size) for size in shape] for shape in (call.shape(), call.out.shape))
    before, after = ([size for size in shape if not same_size(size, 1)] for shape in known)
    is_same = len(before) == len(after) and all(map(same_size, before, after))
    tokens = None if is_same else reader.regroup(DimLabels.TOKEN, (), after)
    if not is_same and (tokens is None or tokens.num_dims != len(after) - 1):
        raise call.refused(Reason.RESULTS_APART, "combined tokens are reshaped before they leave the region")
    return value


def _view_labels(
    reader: Reader, labels: DimLabels, source: Sequence[Size], target: Sequence[Size], call: Call
) -> DimLabels:
    if _is_untouched(labels, source, target):
        return labels
    regrouped = reader.regroup(_named(reader, labels, source), source, target)
    if regrouped is None:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED,
            f"reshape {tuple(source)} -> {tuple(target)} mixes {labels.in_words} with other dims",
        )
    return regrouped


def _is_untouched(labels: DimLabels, source: Sequence[Size], target: Sequence[Size]) -> bool:
    """Whether a reshape leaves the dimensions of the labels alone."""
    leading = list(zip(source, target, strict=False))[: labels.num_dims]
    return len(leading) == labels.num_dims and all(same_size(a, b) for a, b in leading)


def _named(reader: Reader, labels: DimLabels, source: Sequence[Size]) -> DimLabels:
    """The labels with a name for each dimension that was expanded."""
    groups = list(labels.groups)
    for place, group in enumerate(groups):
        if not group and not same_size(source[place], 1):
            groups[place] = _repeated_axis(reader, source[place], is_first=place == 0) or "?"
    return DimLabels(*groups)


def _repeated_axis(reader: Reader, count: Size, *, is_first: bool) -> str | None:
    """Return the axis of a dimension along which tokens are repeated `count` times, or None.

    In front of the tokens (`is_first`), experts are likelier than choices.
    """
    sizes: dict[str, Size | None] = {"k": reader.frame.top_k, "e": reader.num_experts or reader.frame.num_experts}
    for axis in "ek" if is_first else "ke":
        size = sizes[axis]
        if size is not None and same_size(count, size):
            return axis
    shape = () if reader.slots is None else reader.slots.shape
    return next((str(dim) for dim, size in enumerate(shape) if same_size(count, size)), None)


def _whole_labels(
    reader: Reader, value: Ids | Mask, source: Sequence[Size], target: Sequence[Size], call: Call
) -> DimLabels:
    """Return the labels of reshaped integers or masks: of all dimensions; further ones of size one may follow."""
    # One token with one choice: a reshape to no dimension is still that assignment.
    if not target and same_size(reader.frame.num_rows, 1):
        return value.labels
    is_untouched = _is_untouched(value.labels, source, target)
    labels = value.labels if is_untouched else reader.regroup(_named(reader, value.labels, source), source, target)
    trailing = () if labels is None else target[labels.num_dims :]
    if labels is None or not all(same_size(size, 1) for size in trailing):
        what = f"index tensor of {value.names!r}" if isinstance(value, Ids) else "a mask"
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"{what} reshaped to {tuple(target)}")
    return DimLabels(*labels.groups, *[""] * len(trailing))


def static(size: Size, call: Call) -> int:
    number = static_size(size)
    if number is None:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"an inner dimension is symbolic: {size}")
    return number


def _expand(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Expand inside a row; [T,1,...] -> [T,K,...] repeats a token for each of its choices (or experts)."""
    value, source, target = args[0], call.shape(), call.out.shape
    if isinstance(value, Fill):
        return value
    if isinstance(value, (Ids, Mask)):
        return replace(value, labels=DimLabels(*[""] * (len(target) - len(source)), *value.labels.groups))
    rows = reader.as_rows(value, call)
    if rows.labels is DimLabels.NONE:
        return replace(rows, expr=reader.emit(aten.expand.default, rows.expr, list(target)))
    labels, expr = DimLabels(*[""] * (len(target) - len(source)), *rows.labels.groups), rows.expr
    first = len(target) - len(source) + rows.labels.num_dims
    # [T,1,H] expanded to [T,K,H] gives each choice the token's vector: the new dimension is labelled, no part of rows.
    repeats_tokens = DimLabels(rows.labels.axes) is DimLabels.TOKEN and len(source) > rows.labels.num_dims + 1
    if repeats_tokens and same_size(source[rows.labels.num_dims], 1) and not same_size(target[first], 1):
        labels, expr = DimLabels(*labels.groups, ""), reader.emit(aten.select.int, expression_of(rows, call), 1, 0)
        source = [*source[: rows.labels.num_dims], *source[rows.labels.num_dims + 1 :]]
    rest = [static(size, call) for size in target[labels.num_dims :]]
    if expr is None or list(source[rows.labels.num_dims :]) == rest:
        return replace(rows, labels=labels, expr=expr)
    return replace(rows, labels=labels, expr=reader.emit(aten.expand.default, expr, [-1, *rest]))


def _repeat(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Tokens repeated for every expert, [T,H] -> [E*T,H] or [E,T,H]; places repeated for every column."""
    value, source = args[0], call.shape()
    if isinstance(value, (Ids, Mask)):
        if len(args[1]) == len(source) and same_size(call.out.shape[0], source[0]):
            return value
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"an index repeated {args[1]} times")
    rows = reader.as_rows(value, call)
    num_new = len(args[1]) - len(source)
    groups = [""] * num_new + list(rows.labels.groups)
    counts, inner = args[1][: len(groups)], args[1][len(groups) :]
    if rows.labels is DimLabels.NONE or any(count != 1 for count in inner):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"repeat {args[1]} other than of whole rows")
    for place, count in enumerate(counts):
        if same_size(count, 1) or not groups[place]:
            continue
        axis = _repeated_axis(reader, count, is_first=True)
        # What is repeated must be something that routing tells apart, or copies of a row would count as rows.
        if axis is None or axis in rows.labels.axes:
            raise call.refused(
                Reason.ROWS_NOT_FOLLOWED, f"rows repeated {count} times, neither top-k nor the number of experts"
            )
        groups[place] = axis + groups[place]
    return replace(rows, labels=DimLabels(*groups))


def _permute(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    num_dims = len(args[1])
    return _reordered(reader, args[0], [dim % num_dims for dim in args[1]], call)


def _transpose(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    order = list(range(call.ndim))
    left, right = args[1], args[2]
    order[left], order[right] = order[right], order[left]
    return _reordered(reader, args[0], order, call)


def _t(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], (Leaf, Rows)):
        matrix = reader.as_parameter(args[0], call)
        if matrix.labels is DimLabels.NONE:
            return replace(matrix, expr=reader.emit(call.target, matrix.expr))
    return _reordered(reader, args[0], [1, 0][: call.ndim], call)


def _reordered(reader: Reader, value: Any, order: list[int], call: Call) -> Any:
    if isinstance(value, (Ids, Mask)):
        if len(order) != value.labels.num_dims:
            raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"permute {order} moves the routed dimensions")
        return replace(value, labels=DimLabels(*(value.labels.groups[dim] for dim in order)))
    if isinstance(value, Fill):
        return value
    rows = reader.as_rows(value, call)
    num_labels = rows.labels.num_dims
    if rows.expr is None and num_labels == len(order):
        return replace(rows, labels=DimLabels(*(rows.labels.groups[dim] for dim in order)))
    # A routed dimension among those of a row would make entries of several assignments one row.
    if sorted(order[:num_labels]) != list(range(num_labels)):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"permute {order} moves the routed dimensions")
    labels = DimLabels(*(rows.labels.groups[dim] for dim in order[:num_labels]))
    if rows.labels is DimLabels.NONE:
        return replace(rows, expr=reader.emit(aten.permute.default, rows.expr, order))
    inner = [0, *(dim - num_labels + 1 for dim in order[num_labels:])]
    if inner == sorted(inner):
        return replace(rows, labels=labels)
    return replace(rows, labels=labels, expr=_permuted(reader, rows, inner, call))


def _permuted(reader: Reader, rows: Rows, inner: list[int], call: Call) -> fx.Node:
    """The permuted expression; a parameter is permuted before the row dimension is put in front of it."""
    expr = expression_of(rows, call)
    if expr.target is not aten.unsqueeze.default or rows.per_row or expr.args[1] != 0:
        return reader.emit(aten.permute.default, expr, inner)
    permuted = reader.emit(aten.permute.default, expr.args[0], [dim - 1 for dim in inner[1:]])
    return reader.emit(aten.unsqueeze.default, permuted, 0)


def _unsqueeze(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    value, num_dims = args[0], call.ndim
    dim = args[1] + num_dims if args[1] < 0 else args[1]
    if isinstance(value, Combined):
        return still_combined(reader, call, value)
    if isinstance(value, Fill):
        return value
    is_index = isinstance(value, (Ids, Mask))
    rows = value if is_index else reader.as_rows(value, call)
    if is_index or dim < rows.labels.num_dims or rows.expr is None:
        padded = DimLabels(*rows.labels.groups, *[""] * max(0, dim - rows.labels.num_dims))
        return replace(rows, labels=padded.inserting(dim))
    return replace(rows, expr=reader.emit(aten.unsqueeze.default, rows.expr, inner_dim(rows, dim, num_dims, call)))


def _squeeze(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    value, source = args[0], call.shape()
    dims = list(args[1]) if isinstance(args[1], (list, tuple)) else [args[1]]
    if isinstance(value, Combined):
        return still_combined(reader, call, value)
    if isinstance(value, (Fill, Counts)):
        return value
    if isinstance(value, Coordinates):
        is_column = len(value.names) == 1 and call.ndim == 1
        return Ids(value.names[0], DimLabels.SORTED, iteration=value.iteration) if is_column else value
    value = value if isinstance(value, (Ids, Mask)) else reader.as_rows(value, call)
    if len(source) == call.ndim:
        return value
    # From behind, so that dropping one does not move the others.
    for dim in sorted((dim % len(source) for dim in dims), reverse=True):
        if same_size(source[dim], 1):
            value = dropped(reader, value, dim)
    return value


def dropped(reader: Reader, value: Any, dim: int) -> Any:
    """`value` without its dimension `dim` of size one; an axis of that size goes to its neighbour."""
    groups = list(value.labels.groups)
    if dim >= len(groups):
        if value.expr is None:
            return value
        inner = dim - len(groups) + 1 if groups else dim
        return replace(value, expr=reader.emit(aten.select.int, value.expr, inner, 0))
    axis = groups.pop(dim)
    if axis and groups:
        place = max(0, dim - 1)
        groups[place] = groups[place] + axis if dim else axis + groups[place]
    return replace(value, labels=DimLabels(*groups))


RULES: dict[Any, Rule] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
}
