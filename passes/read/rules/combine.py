"""Results on their way back: summed to their tokens, put in their assignment's place, or in their expert's.

In a loop each copy brings its own; a sum grows copy by copy and is complete when something else reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.operators import qualified_name
from memfine_fx.errors import Reason
from memfine_fx.passes.dataflow import same_size, static_size
from memfine_fx.passes.read.dim_labels import DimLabels
from memfine_fx.passes.read.marker import PUT_ROWS
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.rules.indices import Named, named
from memfine_fx.passes.read.rules.masks import scattered
from memfine_fx.passes.read.rules.pointwise import cast, expression_of
from memfine_fx.passes.read.values import ALL, Combined, Counts, Fill, Ids, Leaf, Partial, Rows, Taken, merged

__all__ = ["RULES", "library_rule"]

aten = torch.ops.aten


def _index_put(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Invert a permutation, undo it, or bring rows to their tokens or places."""
    base, indices, values = args[:3]
    if any(index is None for index in indices):
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "index_put by other than one routing index")
    which = named(reader, list(indices), call)
    if call.argument(3, "accumulate", False):
        return _sum(reader, call, base, which, values)
    if isinstance(values, Taken):
        return _put_back(reader, call, base, which, values)
    return _put(reader, call, base, which, values)


def _put_back(reader: Reader, call: Call, base: Any, which: Named, taken: Taken) -> Partial:
    """out[places] = out[places] + rows"""
    # A read, an addition and a write are one sum only if nothing was written in between.
    if taken.added is None or (taken.names, taken.iteration) != (which.names, which.iteration) or taken.sum != base:
        raise call.refused(
            Reason.COMBINE_NOT_FOLLOWED, "rows are added to another state of the output than they were read from"
        )
    is_token = reader.is_all_tokens(DimLabels(*which.names))
    # Without accumulation, of two rows for one place the last one written is left.
    if is_token and not reader.frame.is_distinct and which.iteration.choice is None:
        raise call.refused(
            Reason.COMBINE_NOT_FOLLOWED,
            "a token may name an expert twice here, but only one of its rows would be added",
        )
    return _grown(reader, call, base, which, taken.added, sums=True)


def _index_copy(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    if args[1] != 0:
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "index_copy along other than the first dimension")
    return _put(reader, call, args[0], named(reader, [args[2]], call), args[3])


def _index_add(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    base, dim, ids, values = args[:4]
    if dim != 0 or kwargs.get("alpha", 1) != 1 or not isinstance(ids, Ids):
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "index_add other than of rows to tokens")
    if ids.names == "e":
        return _counted(reader, base, values, call)
    return _sum(reader, call, base, named(reader, [ids], call), values)


def _scatter(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Return the value of a scatter: by expert into [T,E], or of rows to tokens or places.

    In a scatter of rows, the index is repeated for every column.
    """
    base, dim, ids, values = args[:4]
    if not isinstance(ids, Ids):
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "a scatter by other than a routing index")
    is_sum = call.target is aten.scatter_add.default
    if call.target is aten.scatter_reduce.two:
        is_sum = args[4] == "sum" and bool(kwargs.get("include_self", True))
        if not is_sum:
            raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "a scatter that reduces by other than a sum")
    # Ones added by expert are counts, whatever the tensor is called.
    if ids.names == "e" and call.ndim == 1 and is_sum:
        return _counted(reader, base, values, call)
    if ids.names == "e":
        return scattered(reader, call, base, ids, values)
    columns = ids.labels.groups[1:]
    widths = [operand.shape[1:] for operand in (call.args[0], *call.args[2:4]) if isinstance(operand, torch.Tensor)]
    if (
        dim != 0
        or any(columns)
        or not all(same_size(a, b) for own in widths for a, b in zip(own, widths[0], strict=True))
    ):
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "scatter_add other than of rows to tokens")
    which = Named((ids.names,), DimLabels(*ids.labels.groups[:1]), ids.iteration)
    return _sum(reader, call, base, which, values) if is_sum else _put(reader, call, base, which, values)


def _scatter_rows(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """(base, index, rows): `scatter_add` along the first dimension as an operator of a library."""
    base, ids, values = args
    plain = Call(aten.scatter_add.default, (call.args[0], 0, *call.args[1:]), call.kwargs, call.out, call.node)
    return _scatter(reader, plain, (base, 0, ids, values), kwargs)


def _counted(reader: Reader, base: Any, values: Any, call: Call) -> Counts:
    """Rows per expert, as ones added to zeros."""
    num_experts = static_size(call.out.shape[0])
    # Anything but ones onto zeros would be a sum of weights, which no boundary of rows follows from.
    if base != Fill(0.0) or values != Fill(1.0) or call.ndim != 1 or num_experts is None:
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "a sum by expert of other than ones")
    return Counts()


def _sum(reader: Reader, call: Call, base: Any, which: Named, values: Any) -> Any:
    """Rows added at the places that are named."""
    rows = reader.as_rows(values, call)
    if which.iteration.expert is not None:
        return _grown(reader, call, base, which, rows, sums=True)
    labels = DimLabels(*which.names)
    is_fresh = base == Fill(0.0)
    # Row i goes to the token of assignment i because index and rows stand in one order, and every assignment is there
    # once.
    if not (is_fresh or isinstance(base, Leaf)) or rows.labels is not which.labels or not reader.is_all_tokens(labels):
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "rows added to other than tokens in their own order")
    # The sum is a combine only if each of a token's rows is in it once.
    if (
        not reader.covers_choices(rows.labels)
        or merged(rows.iteration, which.iteration) is None
        or not rows.iteration.is_all
    ):
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "some of a token's rows are added, or in another order")
    base_node = base.node if isinstance(base, Leaf) else None
    return Combined(expression_of(rows, call), base_node)


def _put(reader: Reader, call: Call, base: Any, which: Named, values: Any) -> Any:
    """Rows or places written where each has a place of its own."""
    if which.iteration.expert is not None:
        return _grown(reader, call, base, which, reader.as_rows(values, call), sums=False)
    is_permutation = which.labels is DimLabels.SORTED and reader.covers_choices(DimLabels(*which.names))
    if not is_permutation or not isinstance(base, Fill):
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "index_put that does not invert the dispatch order")
    labels = DimLabels(*which.names)
    if isinstance(values, Ids) and values.is_iota and values.labels.num_dims == 1 and call.ndim == 1:
        is_whole = values.names == "#" or reader.covers_choices(values.labels)
        if is_whole and same_size(call.args[2].shape[0], reader.frame.num_rows):
            return Ids("r", labels, iteration=which.iteration)
    if (
        isinstance(values, Rows)
        and values.labels is DimLabels.SORTED
        and merged(values.iteration, which.iteration) is not None
    ):
        return replace(values, labels=labels, iteration=ALL)  # a permutation overwrites every row of the base
    raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "index_put that does not invert the dispatch order")


def _grown(reader: Reader, call: Call, base: Any, which: Named, rows: Rows, *, sums: bool) -> Partial:
    """A sum with the rows of one more copy."""
    expert = which.iteration.expert
    # Row i belongs to place i only where both were made by one mask, in one order.
    if rows.iteration != which.iteration or rows.labels is not which.labels:
        raise call.refused(
            Reason.COMBINE_NOT_FOLLOWED, f"other rows than those of expert {expert} are written at its places"
        )
    labels = DimLabels(*which.names)
    is_token = reader.is_all_tokens(labels)
    # With several choices a token has rows of several experts, and the last one would win.
    if not sums and is_token and reader.frame.top_k != 1:
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "an expert's rows overwrite those of others in the output")
    if sums and not is_token:
        sums = False  # every assignment has a place of its own, which held zero
        if not (base == Fill(0.0) or isinstance(base, Partial)):
            raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "rows are added to other than tokens")
    target = None if sums else labels
    before = base if isinstance(base, Partial) else None
    # A copy counts once; `unify` would else compare an expert with itself and call the sum complete.
    if before is not None and (before.labels is not target or which.iteration.unordered in before.iterations):
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, f"expert {expert} is written back twice, or in two ways")
    reader.note_experts(call, "loops")
    part = which.iteration, expression_of(rows, call)
    if before is None:
        return Partial(target, (part,), _base_of(reader, call, base, sums), call.node)
    return Partial(target, (*before.parts, part), before.base, call.node, before)


def _base_of(reader: Reader, call: Call, base: Any, sums: bool) -> fx.Node | None:
    """The outer node that a sum begins with; None for zeros, and for anything that is overwritten whole."""
    if isinstance(base, Fill) and (base.value == 0 or not (sums or reader.frame.is_mask)):
        return None  # dropped choices leave what was there
    if isinstance(base, Leaf) and sums:
        return base.node
    raise call.refused(Reason.WRITTEN_IN_PLACE, "experts' rows overwrite a tensor that is not fresh")


def _put_rows(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """One expert's rows written at their places in expert order."""
    base, values, counts, expert = args
    rows = reader.as_rows(values, call)
    is_fresh = isinstance(base, Fill) or (isinstance(base, Partial) and base.labels is DimLabels.SORTED)
    if not is_fresh or not reader.are_counts(counts):
        raise call.refused(
            Reason.COMBINE_NOT_FOLLOWED, "an expert's rows are written into other than a fresh tensor in expert order"
        )
    # A second write for one expert would overwrite the first.
    known = set() if isinstance(base, Fill) else base.iterations
    if rows.labels is not DimLabels.SORTED or rows.iteration.expert != expert or rows.iteration.unordered in known:
        raise call.refused(
            Reason.COMBINE_NOT_FOLLOWED, f"other rows than those of expert {expert} are written at its places, or twice"
        )
    # `copy_` casts and broadcasts without a word.
    if not all(map(same_size, call.shape(0)[1:], call.shape(1)[1:])):
        raise call.refused(Reason.COMBINE_NOT_FOLLOWED, "an expert's rows change their shape where they are written")
    reader.note_experts(call, "loops")
    written, dtype = expression_of(rows, call), call.args[0].dtype
    part = rows.iteration, written if call.args[1].dtype is dtype else cast(reader, written, dtype)
    if isinstance(base, Fill):
        return Partial(DimLabels.SORTED, (part,), None, call.node)
    return Partial(DimLabels.SORTED, (*base.parts, part), None, call.node, base)


RULES: dict[Any, Rule] = {
    aten.index_put.default: _index_put,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.scatter_add.default: _scatter,
    aten.scatter_reduce.two: _scatter,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    PUT_ROWS: _put_rows,
}
_LIBRARY_RULES: dict[str, Rule] = {"torchtitan::deterministic_scatter_add": _scatter_rows}


def library_rule(target: Any) -> Rule | None:
    """The rule of an operator that a library registers, whose overload exists only where that is imported, or None."""
    return _LIBRARY_RULES.get(qualified_name(target))
