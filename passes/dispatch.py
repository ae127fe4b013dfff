"""Dispatch and combine: rules for the index bookkeeping around the experts.

Sorting assignments by expert, gathering tokens, weights and parameters, counting rows, undoing the sort and
adding rows back to their tokens only change the *order* in which rows stand. These rules follow that order;
the lowered loop makes its own (one sort, offsets, saved), so nothing of this is executed inside a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import same_size
from memfine_fx.passes.layouts import Combined, Fill, IdKind, Ids, Lead, RowInterpreter, Rows, Rule
from memfine_fx.passes.rowwise import ROWWISE_RULES

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
    if len(indices) != 1 or not isinstance(indices[0], Ids):
        raise CannotChunk("indexing by other than one routing index", node)
    return _gather(interpreter, args[0], indices[0], node)


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
        is_single = interpreter.sizes.top_k == 1 and source.lead is Lead.TOKEN  # a token is its only assignment
        return _reordered(source, Lead.TOKEN if is_single else Lead.FLAT, ids.lead, node)
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


def _counts(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows per expert, by histc over 0..E-1 or bincount."""
    if not isinstance(args[0], Ids) or args[0].kind is not IdKind.EXPERT:
        raise CannotChunk("a histogram of other than expert ids", node)
    if node.target is aten.histc.default:
        bins, low, high = (args[1:] + (100, 0, 0)[len(args) - 1 :])[:3]
        if low != 0 or high != bins - 1:
            raise CannotChunk(f"histogram of {bins} bins over [{low}, {high}] does not count experts one by one", node)
        interpreter.check_num_experts(int(bins), node)
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


def _index_put(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Invert a permutation, or add rows to their tokens."""
    base, indices, values = args[:3]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    ids = indices[0] if len(indices) == 1 else None
    if not isinstance(ids, Ids) or not isinstance(base, Fill):
        raise CannotChunk("index_put into other than a fresh tensor by one routing index", node)
    if accumulates:
        return _combine(interpreter, base, ids, values, node)
    is_permutation = ids == Ids(IdKind.ASSIGNMENT, Lead.SORTED)
    if is_permutation and isinstance(values, Ids) and values.is_iota and values.lead is Lead.FLAT:
        return Ids(IdKind.INVERSE, Lead.FLAT)
    raise CannotChunk("index_put that does not invert the dispatch order", node)


def _index_add(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, dim, ids, values = args[:4]
    if dim != 0 or kwargs.get("alpha", 1) != 1 or not isinstance(base, Fill) or not isinstance(ids, Ids):
        raise CannotChunk("index_add other than of rows to fresh tokens", node)
    return _combine(interpreter, base, ids, values, node)


def _combine(interpreter: RowInterpreter, base: Fill, ids: Ids, values: Any, node: fx.Node) -> Combined:
    rows = interpreter.as_rows(values, node)
    names_tokens = ids.kind is IdKind.TOKEN or (ids.kind is IdKind.ASSIGNMENT and interpreter.sizes.top_k == 1)
    if base.value != 0 or not names_tokens or rows.lead is not ids.lead:
        raise CannotChunk("rows added to other than zero-initialised tokens in their own order", node)
    return Combined(rows.expr)


DISPATCH_RULES: dict[Any, Rule] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.embedding.default: _embedding,
    aten.floor_divide.default: _floor_divide,
    aten.div.Tensor_mode: _floor_divide,
    aten.histc.default: _counts,
    aten.bincount.default: _counts,
    aten.cumsum.default: _cumsum,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.empty_like.default: _blank(None),
    aten.empty.memory_format: _blank(None),
    aten.zeros.default: _blank(0.0),
    aten.zeros_like.default: _blank(0.0),
    aten.new_zeros.default: _blank(0.0),
    aten.index_put.default: _index_put,
    aten.index_add.default: _index_add,
}
