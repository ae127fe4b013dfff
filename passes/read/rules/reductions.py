"""Rules of reductions and norms: inside a row, over a token's choices or all experts, and of masks."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import same_size
from memfine_fx.passes.read.dim_labels import DimLabels
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Args, Kwargs, Reader, Rule
from memfine_fx.passes.read.rules.pointwise import along_dim, along_routed, cast, expression_of
from memfine_fx.passes.read.values import Combined, Counts, Fill, Ids, Mask, Rows

__all__ = ["RULES", "combine_over"]

aten = torch.ops.aten


def reduced(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """sum, mean, max: inside a row; over a token's choices or all experts, which combines rows; of masks."""
    wanted = call.argument(1, "dim")
    keeps_dim = bool(call.argument(2, "keepdim", False))
    if wanted is None or wanted == []:
        raise call.refused(Reason.TOKENS_INTERACT, "a reduction over all dimensions mixes rows")
    num_dims = call.args[0].ndim
    dims = [dim % num_dims for dim in (wanted if isinstance(wanted, (list, tuple)) else [wanted])]
    value = args[0]
    if isinstance(value, Mask):
        return _mask_reduced(reader, call, value, dims, keeps_dim)
    rows = reader.as_rows(value, call)
    is_labels = len(dims) == 1 and dims[0] < rows.labels.num_dims
    if is_labels and not rows.is_dispatched:
        return _over_labels(reader, call, rows, dims[0], keeps_dim)
    if call.target is aten.sum.dim_IntList and is_labels:
        return combine_over(reader, rows, dims[0], cast(reader, expression_of(rows, call), kwargs.get("dtype")), call)
    return along_dim(1)(reader, call, args, kwargs)


def _mask_reduced(reader: Reader, call: Call, mask: Mask, dims: list[int], keeps_dim: bool) -> Any:
    """any, sum or max over a token's choices; a sum over tokens counts."""
    groups = [mask.labels.groups[dim] for dim in dims]
    left = [group for place, group in enumerate(mask.labels.groups) if place not in dims]
    is_sum = call.target is aten.sum.dim_IntList
    # Counts of such masks are not the rows that experts get.
    if mask.is_negated or mask.is_part:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "a mask of what was not chosen, or was dropped, is summed")
    if is_sum and left == ["e"] and reader.covers_choices(DimLabels(*groups)):
        return Counts()
    # A mask over tokens alone counts assignments only where no token names an expert twice.
    if is_sum and left == ["e"] and reader.is_same("".join(groups), "t") and mask.is_distinct:
        return Counts()
    if groups != ["k"]:
        raise along_routed(dims[0], call)
    if not mask.is_distinct:
        raise call.refused(
            Reason.ROWS_NOT_FOLLOWED, "a token may name an expert twice here, but its mask counts it once"
        )
    full_groups = ["" if place in dims else group for place, group in enumerate(mask.labels.groups)]
    return replace(mask, labels=DimLabels(*(full_groups if keeps_dim else left)))


def _argmax(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Which of a token's choices an expert is, where only tokens that chose it are left."""
    mask, dim = args[0], call.argument(1, "dim")
    if not isinstance(mask, Mask) or not isinstance(dim, int):
        raise call.refused(Reason.NO_RULE, f"no row-wise rule for {call.target}")
    is_own = mask.iteration.expert is not None and not mask.is_negated and not mask.is_part and mask.is_distinct
    # A token that did not choose the expert would name its first choice: rows must be this expert's, not all in order.
    are_own_rows = mask.labels.groups == ("r", "k") and not same_size(call.shape()[0], reader.frame.num_rows)
    if not is_own or not are_own_rows or dim % call.args[0].ndim != 1:
        raise call.refused(Reason.INDEX_NOT_FOLLOWED, "the place of an expert among choices that may not have it")
    labels = DimLabels("r", "") if call.argument(2, "keepdim", False) else DimLabels.SORTED
    return Ids("k", labels, iteration=mask.iteration)


def _over_labels(reader: Reader, call: Call, rows: Rows, dim: int, keeps_dim: bool) -> Rows:
    """Weights summed over a token's choices; any other reduction over choices or experts."""
    group = rows.labels.groups[dim]
    labels = rows.labels.with_group(dim, "") if keeps_dim else rows.labels.without(dim)
    is_chosen_sum = call.target is aten.sum.dim_IntList and group == "k" and rows.fill_value == 0
    is_one_of_each = (
        is_chosen_sum and reader.frame.is_distinct and ("e" in labels.axes or rows.iteration.expert is not None)
    )
    return replace(
        rows, labels=labels, fill_value=0.0 if is_chosen_sum else None, expr=rows.expr if is_one_of_each else None
    )


def combine_over(reader: Reader, rows: Rows, dim: int, expr: fx.Node, call: Call) -> Combined:
    """The sum of rows over dimension `dim` of their labels.

    Raises:
        CannotChunk: it sums over something else than a token's choices, or over experts that it did not choose.
    """
    group, others = rows.labels.groups[dim], rows.labels.without(dim)
    # The exit needs a sum over all choices of each token, and over nothing else.
    if group not in ("k", "e") or not reader.is_all_tokens(others) or not rows.iteration.is_all:
        raise along_routed(dim, call)
    if group == "e" and rows.fill_value != 0:
        raise CannotChunk(
            Reason.NOT_PROVED_ZERO,
            "sum over all experts of results that are not proved zero where a token chose others",
            reader.last_without_zeros(call.node),
        )
    if group == "e":
        reader.check_distinct(call)
    return Combined(expr)


def _layer_norm(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Normalisation over the last dimensions; the statistics it also returns are not tracked."""
    rows = reader.as_rows(args[0], call)
    num_inner = call.args[0].ndim - rows.labels.num_dims
    # Statistics over more dimensions than a row has would be those of several rows.
    if rows.labels is DimLabels.NONE or len(args[1]) > num_inner:
        raise call.refused(Reason.TOKENS_INTERACT, "a norm over the routed dimensions mixes rows")
    scales = [None if value is None else reader.as_rows(value, call) for value in args[2:4]]
    if any(scale is not None and scale.labels is not DimLabels.NONE for scale in scales):
        raise call.refused(Reason.TOKENS_INTERACT, "a norm whose weight differs between rows")
    exprs = [None if scale is None else scale.expr for scale in scales]
    whole = reader.emit(call.target, expression_of(rows, call), args[1], *exprs, *args[4:])
    first = replace(rows, expr=reader.emit(operator.getitem, whole, 0), fill_value=None)
    return [first, Fill(None), Fill(None)]


def _softmax(reader: Reader, call: Call, args: Args, kwargs: Kwargs) -> Any:
    """Inside a row; over all experts of weights that are minus infinity where a token chose others, zero there."""
    value = args[0]
    rows = value if isinstance(value, Rows) else None
    if rows is None or rows.is_dispatched or not rows.labels.is_dense:
        return along_dim(1)(reader, call, args, kwargs)
    dim = args[1] % call.ndim
    # exp(-inf) is zero, so unchosen experts weigh nothing and the others share one.
    is_masked = dim < rows.labels.num_dims and rows.labels.groups[dim] == "e" and rows.fill_value == -torch.inf
    return replace(rows, expr=None, fill_value=0.0 if is_masked else None)


RULES: dict[Any, Rule] = {
    aten._softmax.default: _softmax,
    aten.amax.default: reduced,
    aten.argmax.default: _argmax,
    aten.any.dim: reduced,
    aten.any.dims: reduced,
    aten.sum.dim_IntList: reduced,
    aten.mean.dim: reduced,
    aten.native_layer_norm.default: _layer_norm,
}
