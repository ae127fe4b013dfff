"""Integers of the routing, and what they pick.

Sorting assignments by expert, counting rows, inverting an order and gathering only say which assignment an entry
belongs to. An index picks entries by name: where a dimension of the source stands for tokens, and the index names
tokens, the result stands for whatever the index stands for. The lowered loop makes its own order, so none of this runs
in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memfine_fx.errors import Reason
from memfine_fx.passes.dataflow import same_size
from memfine_fx.passes.read.dim_labels import DimLabels
from memfine_fx.passes.read.marker import COUNT_ROWS
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.rules.pointwise import along_dim, pointwise
from memfine_fx.passes.read.values import (
    ALL,
    Coordinates,
    Counts,
    Fill,
    Ids,
    Leaf,
    LoopIteration,
    Mask,
    Partial,
    Rows,
    Taken,
    merged,
)

__all__ = ["RULES", "Named", "named"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Named:
    """Names that several indices give together, one group of axes for each dimension they index."""

    names: tuple[str, ...]
    labels: DimLabels
    iteration: LoopIteration


def named(reader: Reader, indices: list[Any], call: Call) -> Named:
    """Return what several indices, or one mask, name in the dimensions that they index.

    Raises:
        CannotChunk: they are no indices of the routing, or contradict each other.
    """
    if len(indices) == 1 and isinstance(indices[0], Mask):
        places = coordinates(indices[0], call)
        return Named(places.names, DimLabels.SORTED, places.iteration)
    if not indices or not all(isinstance(ids, Ids) for ids in indices):
        why = next((leaf.why for leaf in indices if isinstance(leaf, Leaf) and leaf.why is not None), None)
        raise why or call.refused(Reason.INDEX_NOT_FOLLOWED, "indexing by other than one routing index")
    # Several indices broadcast with each other before they pick, as in NumPy.
    num_dims = max(ids.labels.num_dims for ids in indices)
    labels, iteration = DimLabels(*[""] * num_dims), ALL
    for index in indices:
        joined = reader.joined(labels, DimLabels(*[""] * (num_dims - index.labels.num_dims), *index.labels.groups))
        joint = merged(iteration, index.iteration)
        if joined is None or joint is None:
            raise call.refused(Reason.INDEX_NOT_FOLLOWED, "indices of different experts or tokens meet")
        labels, iteration = joined, joint
    return Named(tuple(ids.names for ids in indices), labels, iteration)


def coordinates(mask: Mask, call: Call, *, has_ones: bool = False) -> Coordinates:
    """Return where a mask of one expert holds; with `has_ones`, its nameless dimensions are known to be of size one.

    Raises:
        CannotChunk: it is about all experts, or of what was not chosen.
    """
    groups = mask.labels.groups
    if (
        mask.iteration.expert is None
        or mask.is_negated
        or mask.is_part
        or "e" in mask.labels.axes
        or ("" in groups and not has_ones)
    ):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "the places of a mask of other than one expert")
    axes = mask.labels.axes
    # `nonzero` lists places in row-major order of the mask, so its last dimension runs fastest.
    is_turned = "k" in axes and not axes.endswith("k")
    return Coordinates(groups, replace(mask.iteration, order="kt" if is_turned else "t"))


def _nonzero(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    if not isinstance(args[0], Mask):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "the places of other than a mask of one expert")
    dims = zip(args[0].labels.groups, call.shape(), strict=True)
    return coordinates(args[0], call, has_ones=all(group or same_size(size, 1) for group, size in dims))


def _sort(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """(values, places): expert ids give the dispatch order, a permutation gives its inverse."""
    is_stable_overload = call.target is aten.sort.stable
    descending = kwargs.get("descending", args[2] if len(args) > 2 and not is_stable_overload else False)
    ids = args[0]
    if not isinstance(ids, Ids) or descending or ids.labels.num_dims != 1 or not ids.iteration.is_all:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "sort of something else than expert ids, ascending")
    if ids.names == "e" and reader.covers_choices(ids.labels) and ids.labels is not DimLabels.SORTED:
        is_stable = is_stable_overload and kwargs.get("stable") is not False
        order = "kt" if ids.labels.groups == ("kt",) else "t"
        iteration = LoopIteration(order=order if is_stable else f"{order} sort")
        return [
            Ids("e", DimLabels.SORTED, iteration=iteration, bound=ids.bound),
            Ids(ids.labels.groups[0], DimLabels.SORTED, iteration=iteration),
        ]
    # Sorting a permutation puts 0 .. N-1 in order, and its places are the inverse.
    if ids.labels is DimLabels.SORTED and reader.is_same(ids.names, "tk") | (ids.names == "kt"):
        labels = DimLabels(ids.names)
        return [Ids(ids.names, labels, is_iota=True), Ids("r", labels, iteration=ids.iteration)]
    raise call.refused(Reason.INDEX_NOT_FOLLOWED, f"sort of {_in_words(ids)}")


def _in_words(ids: Ids) -> str:
    words = {"e": "experts", "tk": "assignments", "t": "tokens", "k": "choices", "r": "places in expert order"}
    return words.get(ids.names, f"indices of {ids.names!r}")


def _index(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    if call.target is aten.index_select.default:
        return _picked(reader, call, args[0], args[1] % call.args[0].ndim, [args[2]])
    if call.target is aten.embedding.default:
        return _picked(reader, call, args[0], 0, [args[1]])
    indices = list(args[1])
    first = next(place for place, index in enumerate(indices) if index is not None)
    if any(index is None for index in indices[first:]):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "indexing by other than one routing index")
    for index in indices[first:]:
        if isinstance(index, Ids):
            reader.note_use(index, "index")
    return _picked(reader, call, args[0], first, indices[first:])


def _picked(reader: Reader, call: Call, source: Any, dim: int, indices: list[Any]) -> Any:
    which = named(reader, indices, call)
    is_place = which.iteration.expert is not None and which.labels is DimLabels.SORTED
    if is_place and isinstance(source, (Partial, Fill)) and dim == 0:
        return Taken(source, which.names, which.iteration)
    if isinstance(source, Fill):
        return source
    if isinstance(source, Leaf):
        source = _leaf_for(reader, call, source, which.names)
    if not isinstance(source, (Rows, Ids, Mask)):
        source = reader.as_rows(source, call)
    source = _with_led_ones(reader, call, source, dim + len(which.names))
    # An index of tokens into a dimension of anything else would pick by accident of sizes.
    own = source.labels.groups[dim : dim + len(which.names)]
    if len(own) < len(which.names) or not all(map(reader.is_same, own, which.names)):
        expected = DimLabels(*which.names).in_words
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, f"gathering {source.labels.in_words} as if it were {expected}")
    groups = (*source.labels.groups[:dim], *which.labels.groups, *source.labels.groups[dim + len(which.names) :])
    return _without_led_choice(reader, _moved(source, DimLabels(*groups), which, call))


def _without_led_choice(reader: Reader, value: Any) -> Any:
    """Routed rows name their choice already: the dimension that K = 1 has left it behind them is one of columns."""
    is_led = isinstance(value, Rows) and value.labels is DimLabels("r", "k") and reader.frame.top_k == 1
    if not is_led or value.expr is None:
        return value
    return replace(value, labels=DimLabels.SORTED, expr=reader.emit(aten.unsqueeze.default, value.expr, 1))


def _with_led_ones(reader: Reader, call: Call, source: Any, num_dims: int) -> Any:
    """The same with dimensions of size one that are indexed, as K = 1 leaves them, in the labels."""
    shape = call.shape()
    while isinstance(source, Rows) and source.expr is not None and source.labels.num_dims < min(num_dims, len(shape)):
        if not same_size(shape[source.labels.num_dims], 1):
            break
        expr = reader.emit(aten.select.int, source.expr, 1, 0)
        source = replace(source, labels=DimLabels(*source.labels.groups, ""), expr=expr)
    return source


def _moved(source: Any, labels: DimLabels, which: Named, call: Call) -> Any:
    leaves_order = "r" in "".join(which.names) and "r" not in which.labels.axes
    # Undoing a sort takes rows out of the order of one copy; only places of that same order give each its own row.
    own = (
        source.iteration.unordered
        if leaves_order and source.iteration.order == which.iteration.order
        else source.iteration
    )
    iteration = merged(own, which.iteration.unordered if leaves_order else which.iteration)
    if iteration is None or (leaves_order and merged(source.iteration, which.iteration) is None):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "rows of one expert are read as another's, or in another order")
    if isinstance(source, (Ids, Mask)):
        return replace(source, labels=labels, iteration=iteration)
    # Picking by expert is what dispatch is: from here on the value belongs to the experts.
    picks_expert = "e" in which.names
    if picks_expert and source.labels.is_dense:
        return replace(source, labels=labels, iteration=iteration, fill_value=None)
    fill_value = (
        None if which.iteration.expert is not None and which.labels is DimLabels.SORTED else source.fill_value
    )  # chosen entries alone
    return replace(
        source,
        labels=labels,
        iteration=iteration,
        fill_value=fill_value,
        is_dispatched=source.is_dispatched or picks_expert,
    )


def _leaf_for(reader: Reader, call: Call, source: Leaf, names: tuple[str, ...]) -> Any:
    """A leaf that is indexed takes the role that the index names."""
    if names == ("e",):
        return reader.as_table(source, call)
    if names in (("t", "k"), ("b", "s", "k")):
        return reader.as_weights(source) or reader.as_rows(source, call)
    if names in (("t",), ("b", "s")) or (reader.frame.top_k == 1 and reader.is_same("".join(names), "t")):
        rows = reader.as_rows(source, call)
        return replace(rows, is_dispatched=rows.labels.axes in ("t", "bs") and call.args[0].ndim > rows.labels.num_dims)
    return reader.as_rows(source, call)


def _gather(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """gather by an index that is expanded over the columns: whole rows, or each choice's own expert's entry."""
    source, ids = args[0], args[2]
    dim = args[1] % call.ndim
    if not isinstance(ids, Ids):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "gather other than of whole rows by a routing index")
    if isinstance(source, Leaf) and ids.names == "e":
        weights = reader.weights_of_experts(source, call.shape()[-1]) if dim == call.ndim - 1 else None
        if weights is None:
            shape = tuple(call.shape())
            raise call.refused(
                Reason.INDEX_NOT_FOLLOWED, f"gather by expert out of {shape}; expected one weight a token and expert"
            )
        source = weights
    elif isinstance(source, Leaf) and dim == 0:
        source = _leaf_for(reader, call, source, (ids.names,))
    source = source if isinstance(source, (Rows, Ids, Mask)) else reader.as_rows(source, call)
    num_labels = source.labels.num_dims
    own = ids.labels.groups
    if dim >= num_labels or not reader.is_same(source.labels.groups[dim], ids.names) or any(own[num_labels:]):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "gather other than of whole rows by a routing index")
    # A gather keeps its other dimensions where they are: entry i of the index looks at entry i of the source.
    others = zip(own[:dim] + own[dim + 1 : num_labels], source.labels.without(dim).groups, strict=True)
    if not all(a == b or reader.is_same(a, b) for a, b in others):
        raise call.refused(
            Reason.INDEX_NOT_FOLLOWED, "gather out of experts' results other than of each token's own choices"
        )
    # An index that is narrower than the source takes the first columns only.
    if not all(map(same_size, call.shape()[num_labels:], call.out.shape[num_labels:])):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "gather of a part of each row")
    return _moved(
        source, DimLabels(*own[:num_labels]), Named((ids.names,), DimLabels(*own[:num_labels]), ids.iteration), call
    )


def _divided(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Assignments by K are tokens."""
    ids = args[0]
    if not isinstance(ids, Ids):
        return pointwise(reader, call, args, kwargs)
    if call.target is aten.div.Tensor_mode and kwargs.get("rounding_mode") is None:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "true division of an index")
    # Assignments are t*K + k, or k*T + t in a turned index: the quotient is what their first axis counts.
    divisor = {"tk": reader.frame.top_k, "kt": reader.frame.num_tokens}.get(ids.names)
    if divisor is None or not isinstance(args[1], (int, torch.SymInt)) or not same_size(args[1], divisor):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "integer division of other than assignments by top-k")
    return replace(ids, names=ids.names[0], is_iota=False)


def _remainder(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """ids % E, as `take_along_dim` writes it: ids are below E already. Assignments % K are choices."""
    ids, divisor = args[0], args[1]
    if not isinstance(ids, Ids):
        return pointwise(reader, call, args, kwargs)
    # The remainder is what their second axis counts, see `_divided`.
    modulus = {"tk": reader.frame.top_k, "kt": reader.frame.num_tokens}.get(ids.names)
    if modulus is not None and isinstance(divisor, (int, torch.SymInt)) and same_size(divisor, modulus):
        return replace(ids, names=ids.names[1], is_iota=False)
    # Only ids of a top-k over E are known to be below E, so that the remainder changes nothing.
    is_same = ids.bound is not None and isinstance(divisor, int) and divisor >= ids.bound
    if ids.names != "e" or not is_same:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, f"remainder of {_in_words(ids)}")
    return ids


def _clamped(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """ids between 0 and E - 1 stay as they are."""
    ids, low, high = args[0], call.argument(1, "min"), call.argument(2, "max")
    if not isinstance(ids, Ids) or ids.names != "e":
        return pointwise(reader, call, args, kwargs)
    is_below = high is None or (ids.bound is not None and isinstance(high, int) and high >= ids.bound - 1)
    is_above = low is None or (ids.bound is not None and isinstance(low, int) and low <= 0)
    if not is_below or not is_above:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "ids that may change where they are clamped")
    return ids


def _counts(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Rows per expert, by histc over 0..E-1 or bincount."""
    ids = args[0]
    if not isinstance(ids, Ids) or ids.names != "e" or not reader.covers_choices(ids.labels):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "a histogram of other than expert ids")
    if call.target is not aten.histc.default:
        reader.note_use(ids, "count")
    # A weighted count is a sum of weights.
    if call.target is aten.bincount.default and call.argument(1, "weights") is not None:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "a histogram that adds up weights does not count rows")
    if call.target is aten.histc.default:
        bins, low, high = (args[1:] + (100, 0, 0)[len(args) - 1 :])[:3]
        if low != 0 or high not in (bins - 1, bins):
            raise call.refused(
                Reason.INDEX_NOT_FOLLOWED,
                f"histogram of {bins} bins over [{low}, {high}] does not count experts one by one",
            )
        # The last bin holds its upper end too, so ids of E count as E - 1 there and are not dropped.
        reader.counts_past_the_last |= high == bins
    return Counts()


def _cumsum(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], Counts) and not args[0].are_ends and args[0].expert is None:
        return Counts(are_ends=True)
    # Such sums number tokens within their expert, as capacities do: a token's place depends on others.
    if isinstance(args[0], (Ids, Mask, Counts)):
        raise call.refused(Reason.TOKENS_INTERACT, "a running sum over the routing makes tokens interact (capacity?)")
    return along_dim(1)(reader, call, args, kwargs)


def _count_as_number(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], Counts) and args[0].expert is not None and isinstance(call.out, torch.SymInt):
        reader.counted[call.out.node.expr] = args[0].expert
    return None


def _arange(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    start, end = (0, args[0]) if len(args) == 1 else args[:2]
    if start != 0 or (len(args) > 2 and args[2] != 1):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "arange that does not count from 0 by 1")
    frame = reader.frame
    # 0 .. N-1 are the numbers of all assignments, and 0 .. T-1 of all tokens, whatever they were made for.
    for names, size in (("tk", frame.num_rows), ("t", frame.num_tokens)):
        if same_size(end, size):
            return Ids(names, DimLabels(names), is_iota=True)
    return Ids("#", DimLabels("?"), is_iota=True)


def _blank(value: float | None) -> Rule:
    def rule(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
        return Fill(value)

    return rule


def _full(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    value = args[0] if call.target is aten.scalar_tensor.default else args[-1] if len(args) > 1 else args[1]
    if not isinstance(value, (int, float)):
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "a tensor filled with a symbolic number")
    return Fill(float(value))


def _expert_of_rows(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """repeat_interleave(counts): the expert of each row, in expert order."""
    if args[0] != Counts():
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "repeat_interleave by other than the experts' counts")
    return Ids("e", DimLabels.SORTED)


RULES: dict[Any, Rule] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.index.Tensor: _index,
    aten.index_select.default: _index,
    aten.embedding.default: _index,
    aten.gather.default: _gather,
    aten.nonzero.default: _nonzero,
    aten.floor_divide.default: _divided,
    aten.div.Tensor_mode: _divided,
    aten.remainder.Scalar: _remainder,
    aten.clamp.default: _clamped,
    aten.histc.default: _counts,
    aten.bincount.default: _counts,
    COUNT_ROWS: _counts,
    aten.cumsum.default: _cumsum,
    aten._local_scalar_dense.default: _count_as_number,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.empty_like.default: _blank(None),
    aten.empty.memory_format: _blank(None),
    aten.new_empty.default: _blank(None),
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.new_full.default: _full,
    aten.scalar_tensor.default: _full,
    aten.ones.default: _blank(1.0),
    aten.ones_like.default: _blank(1.0),
    aten.new_ones.default: _blank(1.0),
    aten.zeros.default: _blank(0.0),
    aten.zeros_like.default: _blank(0.0),
    aten.new_zeros.default: _blank(0.0),
    aten.repeat_interleave.Tensor: _expert_of_rows,
}
