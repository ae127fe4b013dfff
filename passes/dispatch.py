"""Dispatch and combine: rules for the index bookkeeping around the experts.

Sorting assignments by expert, gathering tokens, weights and parameters, counting rows, undoing the sort and
adding rows back to their tokens only change the *order* in which rows stand. These rules follow that order;
the lowered loop makes its own (one sort, offsets, saved), so nothing of this is executed inside a chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import same_size, static_size
from memfine_fx.passes.layouts import Combined, Fill, IdKind, Ids, Lead, Outside, RowInterpreter, Rows, Rule
from memfine_fx.passes.rowwise import ROWWISE_RULES, pointwise_rule

__all__ = ["DISPATCH_RULES"]

aten = torch.ops.aten


def _sort(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(values, places): expert ids give the dispatch order, a permutation gives its inverse."""
    is_stable_overload = node.target is aten.sort.stable
    descending = kwargs.get("descending", args[2] if len(args) > 2 and not is_stable_overload else False)
    ids = args[0]
    if not isinstance(ids, Ids) or descending:
        raise CannotChunk("sort of something else than expert ids, ascending", node)
    if ids.kind is IdKind.EXPERT and ids.lead is Lead.FLAT:
        return (Ids(IdKind.EXPERT, Lead.SORTED), Ids(IdKind.ASSIGNMENT, Lead.SORTED))
    if ids.kind is IdKind.ASSIGNMENT and ids.lead is Lead.SORTED:
        return (Ids(IdKind.ASSIGNMENT, Lead.FLAT, is_iota=True), Ids(IdKind.INVERSE, Lead.FLAT))
    raise CannotChunk(f"sort of {ids.kind.value}", node)


def _index(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    indices = args[1]
    if isinstance(args[0], Rows) and args[0].lead.is_dense and len(indices) == args[0].lead.num_dims:
        return _picked(interpreter, args[0], indices, node)
    if len(indices) != 1 or not isinstance(indices[0], Ids):
        raise CannotChunk("indexing by other than one routing index", node)
    return _gather(interpreter, args[0], indices[0], node)


def _picked(interpreter: RowInterpreter, rows: Rows, indices: list[Any], node: fx.Node) -> Rows:
    """out[tokens, index] of results [T,E,...]: every choice's own, whatever stands for the other experts."""
    named = dict(zip(rows.lead.groups, indices, strict=True))
    ids = named.pop("e", None)
    if not isinstance(ids, Ids) or ids.kind is not IdKind.EXPERT:
        raise CannotChunk("experts' results picked by other than the expert index", node)
    groups = list(ids.lead.groups)
    for name, places in named.items():
        is_own = isinstance(places, Ids) and places.kind is IdKind.TOKEN and places.is_iota and name in groups
        after = len(groups) - groups.index(name) - 1 if is_own else 0
        if not is_own or Lead(*places.lead.groups).groups != (
            *[""] * (len(places.lead.groups) - after - 1),
            name,
            *[""] * after,
        ):
            raise CannotChunk("experts' results picked for other than each token's own choices", node)
    return Rows(ids.lead, rows.expr, rows.per_row)


def _index_select(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[1] != 0 or not isinstance(args[2], Ids):
        raise CannotChunk("index_select along other than the first dimension by a routing index", node)
    return _gather(interpreter, args[0], args[2], node)


def _embedding(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[1], Ids):
        raise CannotChunk("embedding lookup by other than a routing index", node)
    return _gather(interpreter, args[0], args[1], node)


def _gather(interpreter: RowInterpreter, source: Any, ids: Ids, node: fx.Node) -> Any:
    if ids.kind is IdKind.EXPERT:
        table = interpreter.as_expert_table(source, node)
        return Rows(ids.lead, table.expr, per_row=False)
    if ids.kind is IdKind.TOKEN:
        tokens = interpreter.as_tokens(source, node)
        return _reordered(tokens, Lead.TOKEN, ids.lead, node)
    if ids.kind is IdKind.ASSIGNMENT:
        source = source if isinstance(source, Ids) else interpreter.as_rows(source, node)
        if interpreter.sizes.top_k == 1:  # a token is its only assignment
            if isinstance(source, Rows) and source.lead is Lead.CHOICE:  # [T,1] gives [R,1]
                source = replace(source, lead=Lead.TOKEN, expr=interpreter.emit(aten.unsqueeze.default, source.expr, 1))
            if source.lead is Lead.TOKEN:
                return _reordered(source, Lead.TOKEN, ids.lead, node)
        return _reordered(source, Lead.FLAT, ids.lead, node)
    if ids.kind is IdKind.INVERSE:
        source = source if isinstance(source, Ids) else interpreter.as_rows(source, node)
        return _reordered(source, Lead.SORTED, Lead.FLAT, node)
    raise CannotChunk(f"indexing by {ids.kind.value}", node)


def _reordered(source: Rows | Ids, expected: Lead, lead: Lead, node: fx.Node) -> Rows | Ids:
    if source.lead is not expected:
        raise CannotChunk(f"gathering {source.lead.value} as if it were {expected.value}", node)
    if isinstance(source, Ids):
        return Ids(source.kind, lead)
    return Rows(lead, source.expr, source.per_row)


def _floor_divide(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ids, divisor = args[0], args[1]
    if node.target is aten.div.Tensor_mode and kwargs.get("rounding_mode") is None:
        raise CannotChunk("true division of an index", node)
    if not isinstance(ids, Ids) or ids.kind is not IdKind.ASSIGNMENT or divisor != interpreter.sizes.top_k:
        raise CannotChunk("integer division of other than assignments by top-k", node)
    return Ids(IdKind.TOKEN, ids.lead)


def _remainder(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ids % E, as `take_along_dim` writes it: a top-k's ids are below E already."""
    ids, divisor = args[0], args[1]
    if not isinstance(ids, Ids):
        rule = pointwise_rule(node.target)
        assert rule is not None
        return rule(interpreter, node, args, kwargs)
    if ids.kind is not IdKind.EXPERT or not interpreter.has_top_k_ids or not isinstance(divisor, int):
        raise CannotChunk(f"remainder of {ids.kind.value}", node)
    interpreter.check_num_experts(divisor, node)
    return ids


def _counts(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows per expert, by histc over 0..E-1 or bincount."""
    if not isinstance(args[0], Ids) or args[0].kind is not IdKind.EXPERT:
        raise CannotChunk("a histogram of other than expert ids", node)
    if node.target is aten.histc.default:
        bins, low, high = (args[1:] + (100, 0, 0)[len(args) - 1 :])[:3]
        if low != 0 or high not in (bins - 1, bins):
            raise CannotChunk(f"histogram of {bins} bins over [{low}, {high}] does not count experts one by one", node)
        interpreter.check_num_experts(int(bins), node)
        interpreter.counts_past_the_last |= high == bins
    return Ids(IdKind.COUNTS, Lead.EXPERT)


def _cumsum(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], Ids):
        if args[0].kind is not IdKind.COUNTS:
            raise CannotChunk(f"running sum of {args[0].kind.value} makes tokens interact (capacity?)", node)
        return Ids(IdKind.OFFSETS, Lead.EXPERT)
    return ROWWISE_RULES[aten.cumsum.default](interpreter, node, args, kwargs)


def _arange(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    start, end = (0, args[0]) if len(args) == 1 else args[:2]
    if start != 0 or (len(args) > 2 and args[2] != 1):
        raise CannotChunk("arange that does not count from 0 by 1", node)
    sizes = interpreter.sizes
    if same_size(end, sizes.num_rows):
        return Ids(IdKind.ASSIGNMENT, Lead.FLAT, is_iota=True)
    if same_size(end, sizes.num_tokens):
        return Ids(IdKind.TOKEN, Lead.TOKEN, is_iota=True)
    raise CannotChunk(f"arange of {end}, neither tokens nor routed rows", node)


def _blank(value: float | None) -> Rule:
    def rule(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Fill(value)

    return rule


def _full(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[1], (int, float)):
        raise CannotChunk("a tensor filled with a symbolic number", node)
    return Fill(float(args[1]))


def _index_put(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Invert a permutation, undo it, or add rows to their tokens."""
    base, indices, values = args[:3]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    ids = indices[0] if len(indices) == 1 else None
    if not isinstance(ids, Ids):
        raise CannotChunk("index_put by other than one routing index", node)
    if accumulates:
        return _combine(interpreter, base, ids, values, node)
    is_permutation = ids == Ids(IdKind.ASSIGNMENT, Lead.SORTED)
    if is_permutation and isinstance(base, Fill) and isinstance(values, Ids):
        if values.is_iota and values.lead is Lead.FLAT:
            return Ids(IdKind.INVERSE, Lead.FLAT)
    elif is_permutation and isinstance(base, Fill) and isinstance(values, Rows) and values.lead is Lead.SORTED:
        return Rows(Lead.FLAT, values.expr, values.per_row)  # a permutation overwrites every row of the base
    raise CannotChunk("index_put that does not invert the dispatch order", node)


def _index_copy(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, dim, ids, values = args[:4]
    if dim != 0:
        raise CannotChunk("index_copy along other than the first dimension", node)
    return _index_put(interpreter, node, (base, [ids], values), {})


def _index_add(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, dim, ids, values = args[:4]
    if dim != 0 or kwargs.get("alpha", 1) != 1 or not isinstance(ids, Ids):
        raise CannotChunk("index_add other than of rows to tokens", node)
    if ids.kind is IdKind.EXPERT:
        return _counted(interpreter, base, values, node)
    return _combine(interpreter, base, ids, values, node)


def _scatter_add(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, dim, ids, values = args[:4]
    if dim != 0 or not isinstance(ids, Ids):
        raise CannotChunk("scatter_add other than of rows to tokens", node)
    if ids.kind is IdKind.EXPERT:
        return _counted(interpreter, base, values, node)
    return _combine(interpreter, base, replace(ids, lead=_without_columns(ids.lead)), values, node)


def _counted(interpreter: RowInterpreter, base: Any, values: Any, node: fx.Node) -> Ids:
    """Rows per expert, as ones added to zeros."""
    num_experts = static_size(interpreter.fake(node).shape[0])
    if base != Fill(0.0) or values != Fill(1.0) or interpreter.fake(node).ndim != 1 or num_experts is None:
        raise CannotChunk("a sum by expert of other than ones", node)
    interpreter.check_num_experts(num_experts, node)
    return Ids(IdKind.COUNTS, Lead.EXPERT)


def _gather_rows(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """gather along the first dimension by an index expanded over the columns; or each choice's own expert's weight."""
    source, dim, ids = args[:3]
    if isinstance(source, Rows) and isinstance(ids, Ids) and source.lead.is_dense:
        return _picked_along(interpreter, source, dim, ids, node)
    if isinstance(source, Outside) and isinstance(ids, Ids) and ids.kind is IdKind.EXPERT:
        return interpreter.as_weights_of_experts(source, dim, ids.lead, node)
    if dim != 0 or not isinstance(ids, Ids) or ids.lead.num_dims > 2 or ids.lead.groups[1:] not in ((), ("",)):
        raise CannotChunk("gather other than of whole rows by a routing index", node)
    widths = [interpreter.fake(argument).shape[1:] for argument in (node.args[0], node)]  # type: ignore[arg-type]  # nodes
    if not all(same_size(a, b) for a, b in zip(*widths, strict=True)):
        raise CannotChunk("gather of a part of each row", node)
    return _gather(interpreter, source, replace(ids, lead=_without_columns(ids.lead)), node)


def _picked_along(interpreter: RowInterpreter, rows: Rows, dim: int, ids: Ids, node: fx.Node) -> Rows:
    """gather along the experts of results [T,E,...], by the expert index expanded over the columns."""
    num_dims, groups = interpreter.fake(node).ndim, rows.lead.groups
    dim = dim % num_dims
    num_lead = rows.lead.num_dims
    own = ids.lead.groups[:num_lead]
    is_expert = (
        ids.kind is IdKind.EXPERT and dim < num_lead and groups[dim] == "e" and not any(ids.lead.groups[num_lead:])
    )
    if not is_expert or own[:dim] + own[dim + 1 :] != groups[:dim] + groups[dim + 1 :]:
        raise CannotChunk("gather out of experts' results other than of each token's own choices", node)
    widths = [interpreter.fake(argument).shape[num_lead:] for argument in (node.args[0], node)]  # type: ignore[arg-type]  # nodes
    if not all(same_size(a, b) for a, b in zip(*widths, strict=True)):
        raise CannotChunk("gather of a part of each row", node)
    return Rows(Lead(*own), rows.expr, rows.per_row)


def _without_columns(lead: Lead) -> Lead:
    return Lead(*lead.groups[:1]) if lead.groups[1:] == ("",) else lead


def _combine(interpreter: RowInterpreter, base: Any, ids: Ids, values: Any, node: fx.Node) -> Combined:
    rows = interpreter.as_rows(values, node)
    names_tokens = ids.kind is IdKind.TOKEN or (ids.kind is IdKind.ASSIGNMENT and interpreter.sizes.top_k == 1)
    is_fresh = isinstance(base, Fill) and base.value == 0
    if not (is_fresh or isinstance(base, Outside)) or not names_tokens or rows.lead is not ids.lead:
        raise CannotChunk("rows added to other than tokens in their own order", node)
    return Combined(rows.expr, base.node if isinstance(base, Outside) else None)


def _expert_of_rows(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """repeat_interleave(counts): the expert of each row, in expert order."""
    if not isinstance(args[0], Ids) or args[0].kind is not IdKind.COUNTS:
        raise CannotChunk("repeat_interleave by other than the experts' counts", node)
    return Ids(IdKind.EXPERT, Lead.SORTED)


DISPATCH_RULES: dict[Any, Rule] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.embedding.default: _embedding,
    aten.floor_divide.default: _floor_divide,
    aten.div.Tensor_mode: _floor_divide,
    aten.remainder.Scalar: _remainder,
    aten.histc.default: _counts,
    aten.bincount.default: _counts,
    aten.cumsum.default: _cumsum,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.empty_like.default: _blank(None),
    aten.empty.memory_format: _blank(None),
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.scalar_tensor.default: lambda interpreter, node, args, kwargs: Fill(float(args[0])),
    aten.ones.default: _blank(1.0),
    aten.ones_like.default: _blank(1.0),
    aten.new_ones.default: _blank(1.0),
    aten.zeros.default: _blank(0.0),
    aten.zeros_like.default: _blank(0.0),
    aten.new_zeros.default: _blank(0.0),
    aten.index_put.default: _index_put,
    aten.index_add.default: _index_add,
    aten.index_copy.default: _index_copy,
    aten.scatter_add.default: _scatter_add,
    aten.gather.default: _gather_rows,
    aten.repeat_interleave.Tensor: _expert_of_rows,
}
