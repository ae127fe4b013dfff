"""Extraction: a walk that is over, as the one canonical record.

The region is read off: its exit is where the walk ended, its inside whatever ran between its inputs and that exit, its
inputs the outer nodes that the experts' expression reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import provenance, same_size, static_size, tensor_of, written_node
from memfine_fx.passes.ops import MATMULS, name_of
from memfine_fx.passes.read.dropped import insert_ids
from memfine_fx.passes.read.expressions import Expressions, Input, Param, RowsDiffer
from memfine_fx.passes.read.frame import Exit
from memfine_fx.passes.read.reader import Reader
from memfine_fx.passes.read.values import Combined, Rows
from memfine_fx.records import Cut, ExpertFunction, MoERegion, OutOfRange, RegionDims

__all__ = ["NoExperts", "region_of_rows", "region_of_slots"]


class NoExperts(CannotChunk):
    """Refusal of a result that is not computed from tokens and expert parameters: a lookup, or an unknown spelling."""

    def __init__(self, node: fx.Node) -> None:
        details = "no token-indexed input or no expert parameters reach the output"
        super().__init__(Reason.UNKNOWN_SPELLING, details, node)


def region_of_rows(reader: Reader, found: Exit) -> MoERegion:
    """The region of routed rows that a walk found.

    Raises:
        CannotChunk: tokens or results are of other shapes, or the expression reads what no expert function could.
        RowsDiffer: results of experts were taken for tokens.
    """
    value, num_token_dims = found.value, len(reader.frame.token_shape)
    expr = value.expr
    assert expr is not None
    inputs = _Inputs.of(reader.expressions, expr, found.node)
    base = value.base if isinstance(value, Combined) else None
    cut = _cut(reader, found.node, {*inputs.outers, reader.frame.index, *([] if base is None else [base])})
    hidden, out = tensor_of(inputs.hidden), tensor_of(written_node(found.node))
    if hidden.ndim not in (2, num_token_dims + 1):
        raise CannotChunk(Reason.UNREADABLE, f"tokens of shape {tuple(hidden.shape)}; expected [T,H]", inputs.hidden)
    if out.ndim not in (2, num_token_dims + 1) and not (out.ndim == 3 and same_size(out.shape[1], 1)):
        raise CannotChunk(
            Reason.RESULTS_APART, "the exit holds rows of several dimensions, not yet one vector a token", found.node
        )
    return _record(reader, cut, inputs, expr, base)


def region_of_slots(reader: Reader, node: fx.Node, rows: Rows) -> MoERegion:
    """The region of rows in their experts' slots that ends at a node.

    Raises:
        CannotChunk: rows do not come out where they went in, or the expression reads what no expert function could.
    """
    assert rows.expr is not None and reader.slots is not None
    inputs = _Inputs.of(reader.expressions, rows.expr, node)
    if inputs.hidden is not reader.slots.root or inputs.weight is not None:
        raise CannotChunk(Reason.RESULTS_APART, "rows leave the experts in other slots than they came in", node)
    return _record(reader, _cut(reader, node, set(inputs.outers)), inputs, rows.expr, None)


@dataclass(frozen=True)
class _Inputs:
    """The inputs of an expression: placeholders in the order of arguments, and the outer nodes behind them."""

    order: tuple[fx.Node, ...]
    hidden: fx.Node
    weight: Input | None
    columns: tuple[fx.Node, ...]
    params: tuple[Param, ...]

    @property
    def outers(self) -> Iterator[fx.Node]:
        yield self.hidden
        if self.weight is not None:
            yield self.weight.outer
        yield from self.columns
        for param in self.params:
            yield from param.nodes

    @staticmethod
    def of(expressions: Expressions, expr: fx.Node, node: fx.Node) -> _Inputs:
        inputs = expressions.inputs_of(expr)
        rows = [placeholder for placeholder, origin in inputs.items() if origin.role == "rows"]
        outers = {inputs[placeholder].outer for placeholder in rows}
        if len(outers) > 1:
            raise RowsDiffer(list(outers), node)
        weights = [placeholder for placeholder, origin in inputs.items() if origin.role in ("weight", "column")]
        if len(weights) > 1:
            names = " and ".join(str(inputs[placeholder].outer) for placeholder in weights[:2])
            raise CannotChunk(Reason.ROWS_NOT_FOLLOWED, f"two routing weights, {names}; expected one", node)
        others = [placeholder for placeholder in inputs if placeholder not in (*rows, *weights)]
        params = tuple(_param_of(expressions, placeholder, inputs[placeholder], node) for placeholder in others)
        if not rows or not any(param.kind != "shared" for param in params):
            raise NoExperts(node)
        weight = inputs[weights[0]] if weights else None
        is_column = weight is not None and weight.role == "column"
        if is_column and not expressions.columns:
            raise CannotChunk(Reason.ROWS_NOT_FOLLOWED, "a weight of one expert stands for all", node)
        columns = expressions.columns if is_column else ()
        return _Inputs((*rows, *weights, *others), outers.pop(), weight, columns, params)


def _param_of(expressions: Expressions, placeholder: fx.Node, one: Input, node: fx.Node) -> Param:
    known = expressions.params.get(placeholder)
    if known is not None:
        return known
    if one.role == "entry":
        raise CannotChunk(Reason.ROWS_NOT_FOLLOWED, "one entry of a table stands for all experts'", node)
    return Param("expert", (one.outer,), one.dim) if one.role == "table" else Param("shared", (one.outer,))


def _record(reader: Reader, cut: Cut, inputs: _Inputs, expr: fx.Node, base: fx.Node | None) -> MoERegion:
    frame, num_experts, slots = reader.frame, reader.num_experts, reader.slots
    hidden = tensor_of(inputs.hidden)
    hidden_size = static_size(hidden.shape[-1])
    if hidden_size is None:
        raise CannotChunk(Reason.UNREADABLE, f"tokens of shape {tuple(hidden.shape)}; expected [T,H]", inputs.hidden)
    if num_experts is None:
        raise NoExperts(cut.exit)
    num_tokens = frame.num_tokens if slots is None else math.prod(hidden.shape[:-1])
    family = reader.family if slots is None else "slots"
    if family is None:
        raise CannotChunk(Reason.UNKNOWN_SPELLING, "no known spelling of experts", cut.exit)
    weight = inputs.weight
    kinds = tuple(param.kind for param in inputs.params)
    matmuls = (node for node in cut.nodes if node in reader.expert_nodes or name_of(node) in MATMULS)
    first_matmul = next(matmuls, cut.exit)
    return MoERegion(
        cut=cut,
        family=family,
        hidden=inputs.hidden,
        expert_index=None if slots is not None else frame.index if not frame.is_mask else insert_ids(frame.index),
        routing_weight=None if weight is None else weight.outer,
        params=tuple(node for param in inputs.params for node in param.nodes),
        expert_fn=ExpertFunction(reader.expressions.finish(expr, inputs.order), weight is not None, kinds),
        dims=RegionDims(
            str(num_tokens), hidden_size, num_experts, frame.top_k if slots is None else 1,
            reader.widths[-1] if reader.widths else None,
        ),
        first_matmul=first_matmul,
        where=provenance(first_matmul),
        out_of_range=_out_of_range(reader, family, num_experts, cut.exit),
        base=base,
        gathers_weight=weight is not None and (weight.is_gathered or bool(inputs.columns)),
        weight_columns=inputs.columns,
        slot_dim=None if slots is None else slots.expert_dim,
        expert_dims=tuple(param.dim for param in inputs.params for _ in param.nodes),
        stops=tuple(node for node in cut.nodes if node in reader.stops),
    )  # fmt: skip


def _out_of_range(reader: Reader, family: str, num_experts: int, node: fx.Node) -> OutOfRange:
    """Return what assignments do whose ids are not in [0, E), as the layer's own way of reading ids has it.

    Raises:
        CannotChunk: negative ids count from the end in one place and name no expert in another.
    """
    uses, bound = reader.unbounded_uses, reader.frame.bound
    if bound is not None and bound <= num_experts:
        return "error"  # which no id is
    if {"index", "compare"} <= uses:
        raise CannotChunk(
            Reason.INDEX_NOT_FOLLOWED,
            "negative ids index a table from its end and are compared with expert numbers, which none of them equals",
            node,
        )
    if "compare" in uses or reader.frame.is_mask or (family == "loops" and "count" not in uses):
        return "dropped"
    if family == "grouped" and not reader.counts_past_the_last:
        return "larger dropped"
    return "from the end" if uses == {"index"} else "error"


def _cut(reader: Reader, exit_node: fx.Node, roots: set[fx.Node]) -> Cut:
    """Whatever ran between the inputs and the exit."""
    flow, inside, pending = reader.flow, {exit_node}, [exit_node]
    while pending:
        for source in flow.sources(pending.pop()):
            if source in reader.ran and source not in roots and source not in inside:
                inside.add(source)
                pending.append(source)
    nodes = tuple(sorted(inside, key=flow.position.__getitem__))
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    index = None if reader.slots is not None else reader.frame.index
    return Cut(index, exit_node, nodes, tuple(inputs), len(reader.frame.token_shape))
