"""Masks: where the routing names an expert, by comparing ids with numbers, one-hot or scatter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import same_size
from memfine_fx.passes.ops import target_name
from memfine_fx.passes.read.dim_labels import DimLabels
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.rules.pointwise import Operand, align, check_about, expression_of, pointwise
from memfine_fx.passes.read.values import ALL, Fill, Ids, Leaf, LoopIteration, Mask, Partial, Rows, Taken, merged

__all__ = ["RULES", "scattered"]

aten = torch.ops.aten

_THRESHOLDS: dict[Any, int] = {aten.gt.Scalar: 0, aten.ne.Scalar: 0, aten.ge.Scalar: 1, aten.eq.Scalar: 1}


def _compared(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """ids == e; mask > 0, != 0, >= 1, == 1 say what the mask says, mask == 0 the opposite."""
    value, number = args[:2]
    if isinstance(value, Ids) and value.names == "e" and type(number) is int:
        if call.target in (aten.eq.Scalar, aten.ne.Scalar):
            reader.note_use(value, "compare")
            # Ids that are one expert's already are all the same number.
            iteration = merged(value.iteration, replace(ALL, expert=number))
            if iteration is None:
                raise call.refused(Reason.INDEX_NOT_FOLLOWED, "one expert's ids are compared with another")
            return Mask(
                value.labels, iteration, is_negated=call.target is aten.ne.Scalar, is_distinct=value.is_distinct
            )
        return _compared_by_size(call, value, number)
    if isinstance(value, Mask):
        if number == _THRESHOLDS.get(call.target):
            return value
        if call.target is aten.eq.Scalar and number == 0:
            return replace(value, is_negated=not value.is_negated)
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, f"a mask compared with {number}")
    return pointwise(reader, call, args, kwargs)


def _compared_by_size(call: Call, ids: Ids, number: int) -> Fill:
    """ids >= E, as transformers marks rows of other ranks' experts: true of none, for they come out of a top-k of E."""
    if ids.bound is not None:
        of_smallest, of_largest = (bool(call.target(torch.tensor(end), number)) for end in (0, ids.bound - 1))
        if of_smallest == of_largest:  # so of all between them
            return Fill(float(of_smallest))
    raise call.refused(Reason.INDEX_NOT_FOLLOWED, "ids compared by size")


def _equal(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """ids == arange(E): where each expert is named."""
    ids = next((value for value in args if isinstance(value, Ids) and value.names == "e"), None)
    other = next((value for value in args if isinstance(value, Ids) and value is not ids), None)
    if ids is None or other is None:
        return pointwise(reader, call, args, kwargs)
    if not other.is_iota or other.names == "e":
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "ids compared with other ids")
    if target_name(call.node) != "one_hot":  # which raises for ids out of range
        reader.note_use(ids, "compare")
    mine = DimLabels(*[""] * (call.ndim - ids.labels.num_dims), *ids.labels.groups)
    groups = [""] * (call.ndim - other.labels.num_dims) + list(other.labels.groups)
    places = [place for place, group in enumerate(groups) if group]
    # The range must stand alone in its dimension, or entry i of one would meet entry i of the other.
    if len(places) != 1 or mine.groups[places[0]]:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "ids compared with a range along their own dimension")
    labels = mine.with_group(places[0], "e")
    return Mask(labels, ids.iteration, is_negated=call.target is aten.ne.Tensor, is_distinct=ids.is_distinct)


def _negated(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], Mask):
        return replace(args[0], is_negated=not args[0].is_negated)
    return pointwise(reader, call, args, kwargs)


def _both(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """A mask and something else: it may be zero for named experts too."""
    masks = [value for value in args if isinstance(value, Mask)]
    # Of a negated mask the part that is taken away would be added to what was chosen.
    if len(masks) != 1 or masks[0].is_negated:
        return pointwise(reader, call, args, kwargs)
    return replace(masks[0], is_part=True, labels=_wide_labels(masks[0], call))


def _wide_labels(mask: Mask, call: Call) -> DimLabels:
    labels = DimLabels(*[""] * (call.ndim - mask.labels.num_dims), *mask.labels.groups)
    if any(not group and not same_size(size, 1) for group, size in zip(labels.groups, call.out.shape, strict=True)):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "a mask is widened by what it meets")
    return labels


def _multiplied(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """A product with a mask: the other operand where the mask names the expert, zero elsewhere."""
    for place, (mask, value) in enumerate((args[:2], args[1::-1])):
        if not isinstance(mask, Mask) or mask.is_negated:
            continue
        # A product of masks is a mask, one with floats is rows.
        is_float = call.args[1 - place].dtype.is_floating_point
        if isinstance(value, (Rows, Leaf, Partial)) and is_float and not mask.is_part:
            rows = _rows_of_choices(reader, call, value, mask, call.args[place])
            return _where_named(reader, call, mask, rows, call.args[place], call.args[1 - place], 0.0)
        if isinstance(value, (Mask, Leaf, Rows)) and not is_float:
            return _both(reader, call, args, kwargs)
    return pointwise(reader, call, args, kwargs)


def _rows_of_choices(reader: Reader, call: Call, value: Any, mask: Mask, of_mask: torch.Tensor) -> Rows:
    """Return the operand of a mask as weights of each choice or expert, if its shape says so, else as rows."""
    if isinstance(value, Leaf) and "e" in mask.labels.groups:
        size = of_mask.shape[mask.labels.groups.index("e")]
        return reader.weights_of_experts(value, size) or reader.as_weights(value) or reader.as_rows(value, call)
    return reader.as_rows(value, call)


def _where_named(
    reader: Reader, call: Call, mask: Mask, rows: Rows, of_mask: torch.Tensor, of_rows: torch.Tensor, fill_value: float
) -> Rows:
    """Rows where the mask names the expert, `fill_value` elsewhere."""
    # Rows of one expert under the mask of another are zero everywhere they are computed.
    iteration = merged(mask.iteration, rows.iteration)
    if iteration is None:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "weights of different experts meet")
    stand_in = Rows(mask.labels, rows.expr, iteration=mask.iteration)
    if rows.expr is None:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "a mask meets weights that mix a token's choices")
    operands = [Operand(stand_in, of_mask), Operand(rows, of_rows)]
    labels, expressions = align(reader, operands, call.ndim, call)
    check_about(iteration, labels, call)
    are_rows = call.ndim > labels.num_dims and iteration.expert is not None
    return Rows(labels, expressions[1], rows.per_row, fill_value, iteration, rows.is_dispatched or are_rows)


def _where(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """A choice by a mask takes, at unchosen entries, the branch that the mask names there."""
    places = (0, 1, 2) if call.target is aten.where.self else (1, 2, 0)  # else masked_fill(x, mask, value)
    mask, chosen, other = (args[place] for place in places)
    if isinstance(mask, Fill) and mask.value is not None:
        branch_place = places[1] if mask.value else places[2]
        if isinstance(call.args[branch_place], torch.Tensor) and _has_shape_of(call, branch_place):
            return args[branch_place]
    if not isinstance(mask, Mask):
        return pointwise(reader, call, args, kwargs)
    if mask.is_negated:
        chosen, other, places = other, chosen, (places[0], places[2], places[1])
    if isinstance(chosen, (Rows, Leaf, Partial)) and not mask.is_part:
        fill_value = _constant(other)
        rows = _rows_of_choices(reader, call, chosen, mask, call.args[places[0]])
        if fill_value is not None and rows.expr is not None:
            return _where_named(reader, call, mask, rows, call.args[places[0]], call.args[places[1]], fill_value)
    fill_value = _constant(other) if not isinstance(other, Rows) else other.fill_value
    if not call.out.dtype.is_floating_point:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "integers chosen by a mask")
    return Rows(
        DimLabels(*[""] * (call.ndim - mask.labels.num_dims), *mask.labels.groups),
        None,
        fill_value=fill_value,
        iteration=mask.iteration,
    )


def _constant(value: Any) -> float | None:
    value = value.value if isinstance(value, Fill) else value
    return float(value) if isinstance(value, (int, float)) else None


def scattered(reader: Reader, call: Call, base: Any, ids: Ids, values: Any) -> Any:
    """A constant tensor [T,E] with something written at the chosen entries."""
    dim = call.args[1] % call.ndim
    # Entry [t, e] may only be written by token t, or tokens would meet.
    is_dense = ids.names == "e" and dim == call.ndim - 1 and ids.labels.num_dims == call.ndim
    if not is_dense or not isinstance(base, Fill) or base.value is None or call.kwargs.get("reduce"):
        raise call.refused(
            Reason.INDEX_NOT_FOLLOWED, "a scatter other than by expert into a constant tensor of all experts"
        )
    reader.note_use(ids, "count")  # a scatter takes no negative ids either
    labels = ids.labels.with_group(dim, "e")
    number = _constant(values)
    is_sum = call.target is aten.scatter_add.default
    if number is not None:
        # Ones that are added make a two where a token names an expert twice; ones that are written do not.
        is_mask = {base.value, number} == {0.0, 1.0} and (ids.is_distinct or not is_sum)
        if is_mask:
            return Mask(labels, ids.iteration, is_negated=number == 0.0, is_distinct=ids.is_distinct)
        return Rows(labels, None, fill_value=base.value, iteration=ids.iteration)
    rows = reader.as_rows(values, call)
    # Where a token names an expert twice, only one of the two values is left.
    is_own = rows.labels is ids.labels and ids.is_distinct and rows.expr is not None and ids.iteration.is_all
    return Rows(
        labels,
        rows.expr if is_own else None,
        fill_value=base.value,
        iteration=ids.iteration,
        is_dispatched=rows.is_dispatched,
    )


def _add(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Rows added to what a sum held at their places; results of experts that ran on all tokens, summed."""
    if kwargs.get("alpha", 1) != 1:
        return pointwise(reader, call, args, kwargs)
    for place, (base, rows) in enumerate((args[:2], args[1::-1])):
        if isinstance(base, Taken):
            added = reader.as_rows(rows, call)
            joint = merged(base.iteration, added.iteration)
            if base.added is not None or joint is None or added.iteration.expert is None:
                raise call.refused(
                    Reason.INDEX_NOT_FOLLOWED, "other rows than the expert's own are added to its places"
                )
            return replace(base, added=added)
        # Zeros that a loop starts its sum with add nothing, if they do not widen or cast what they meet.
        is_zero = base == Fill(0.0) or (type(base) is int and base == 0)
        if is_zero and isinstance(rows, (Rows, Partial)) and _has_shape_of(call, 1 - place):
            return rows
    if any(isinstance(value, Partial) for value in args[:2]) or _sums_experts(args):
        return _summed(reader, call, args)
    return pointwise(reader, call, args, kwargs)


def _has_shape_of(call: Call, place: int) -> bool:
    own, out = call.args[place], call.out
    return own.ndim == out.ndim and own.dtype is out.dtype and all(map(same_size, own.shape, out.shape))


def _sums_experts(args: Args) -> bool:
    """Whether each side is zero where its own expert was not chosen, and one side at least is one expert's."""
    owned = [value for value in args[:2] if isinstance(value, Rows) and value.fill_value == 0 and value.is_dispatched]
    experts = [value.iteration.expert for value in owned if value.iteration.expert is not None]
    if len(experts) == 2:
        return experts[0] != experts[1]
    return len(experts) == 1 and any(isinstance(value, Leaf) for value in args[:2])


def _summed(reader: Reader, call: Call, args: Args) -> Partial:
    parts: list[tuple[LoopIteration, fx.Node]] = []
    bases: list[fx.Node] = []
    before = None
    for place, value in enumerate(args[:2]):
        if isinstance(value, Partial) and value.labels is None:
            parts.extend(value.parts)
            bases += [] if value.base is None else [value.base]
            before = before or value
        elif isinstance(value, Rows) and value.iteration.expert is not None and value.fill_value == 0:
            if not reader.is_all_tokens(value.labels):
                raise call.refused(Reason.INDEX_NOT_FOLLOWED, "results of experts for other than all tokens are summed")
            if value.iteration.choice is None:
                reader.check_distinct(call)
            parts.append((value.iteration, expression_of(value, call)))
        elif isinstance(value, Leaf) and _has_shape_of(call, place):
            bases.append(value.node)
        else:
            raise _no_sum(reader, call, args)
    if len(bases) > 1:
        raise _no_sum(reader, call, args)
    # A sum that is added to itself holds every part twice.
    if len({iteration for iteration, _ in parts}) < len(parts):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "an expert's results are added twice")
    reader.note_experts(call, "loops")
    return Partial(None, tuple(parts), bases[0] if bases else None, call.node, before)


def _no_sum(reader: Reader, call: Call, args: Args) -> CannotChunk:
    """Why two values are no sum of experts' results; what reads a sum that is complete ends the walk here."""
    whole = [reader.as_rows(value, call) for value in args[:2]]
    return call.refused(Reason.INDEX_NOT_FOLLOWED, f"rows of {len(whole)} kinds meet in a sum over experts")


RULES: dict[Any, Rule] = {
    aten.eq.Scalar: _compared,
    aten.ne.Scalar: _compared,
    aten.gt.Scalar: _compared,
    aten.ge.Scalar: _compared,
    aten.lt.Scalar: _compared,
    aten.eq.Tensor: _equal,
    aten.ne.Tensor: _equal,
    aten.bitwise_not.default: _negated,
    aten.logical_not.default: _negated,
    aten.bitwise_and.Tensor: _both,
    aten.logical_and.default: _both,
    aten.mul.Tensor: _multiplied,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _where,
    aten.masked_fill.Tensor: _where,
    aten.add.Tensor: _add,
}
