"""The methods of a reader that rules call: sizes, labels, and the roles that values can take.

A leaf takes the role that its use and its shape give it; a sum is complete when something reads it as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.memory.sizes import size_expr
from memfine_fx.passes.dataflow import Dataflow, is_float_tensor, node_value, same_size, static_size
from memfine_fx.passes.read.dim_labels import DimLabels, Size, join, regroup, without_ones
from memfine_fx.passes.read.expressions import FLAT, Expressions, Input
from memfine_fx.passes.read.frame import Exit, Frame, Slots
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.sinking import Sinking
from memfine_fx.passes.read.values import Combined, Ids, Leaf, LoopIteration, Partial, Rows, Unknown

__all__ = ["IdUse", "Roles", "can_stop"]

IdUse = Literal["index", "compare", "count"]
"""How ids of experts are read: as the index of a table, where negative ones count from its end; compared with the
numbers of experts, where those of none name no expert; or counted or scattered to, where negative ones are an error."""

aten = torch.ops.aten


class Roles:
    """The side of a reader that rules see.

    Args:
        flow: of Dynamo's graph; not changed.
        frame: where the walk starts.
        forced: nodes that run as part of the region although they look like tokens.
        expands_tables: whether computed tables are read whole.
    """

    def __init__(
        self, flow: Dataflow, frame: Frame, forced: frozenset[fx.Node], *, expands_tables: bool = False
    ) -> None:
        self.flow = flow
        self.frame = frame
        self.expressions = Expressions()
        self.emit = self.expressions.emit
        self.num_experts: int | None = None
        self.slots: Slots | None = None
        self.family: str | None = None
        self.widths: list[int] = []
        self.counted: dict[object, int] = {}
        self.counts_past_the_last = False
        self.unbounded_uses: set[IdUse] = set()
        self.expert_nodes: dict[fx.Node, None] = {}
        self.without_zeros: list[fx.Node] = []
        self._sinking = Sinking(flow, frame, forced, expands_tables=expands_tables)
        self._end = len(flow.position)

    def size_of(self, axis: str) -> Size:
        """Return the size of an axis of labels."""
        frame = self.frame
        if axis.isdigit():
            assert self.slots is not None
            return self.slots.shape[int(axis)]
        if axis == "e":
            num_experts = frame.num_experts if self.num_experts is None else self.num_experts
            if num_experts is None:
                raise CannotChunk(Reason.ROWS_NOT_FOLLOWED, "how many experts there are is not known yet")
            return num_experts
        if axis == "s":
            return frame.token_shape[1] if len(frame.token_shape) == 2 else 1
        sizes = {"t": frame.num_tokens, "b": frame.token_shape[0], "k": frame.top_k, "r": frame.num_rows}
        if axis not in sizes:
            raise CannotChunk(
                Reason.ROWS_NOT_FOLLOWED, "something repeated is neither a token's choices nor the experts"
            )
        return sizes[axis]

    def regroup(self, labels: DimLabels, source: Sequence[Size], target: Sequence[Size]) -> DimLabels | None:
        """The labels of a reshape from `source` to `target`; None where rows would mix."""
        source, target = ([self.known_size(size) for size in shape] for shape in (source, target))
        # A dimension of one axis has the size that stands in the graph, which need not be written as the frame's is.
        own = {group: size for group, size in zip(labels.groups, source, strict=False) if len(group) == 1}
        return regroup(labels, target, lambda axis: own[axis] if axis in own else self.size_of(axis))

    def known_size(self, size: Size) -> Any:
        """A size in which the experts' rows are counted, in sizes that are known before: together they are all rows."""
        if not isinstance(size, torch.SymInt):
            return size
        expr = size.node.expr
        # Only when every expert is counted is the sum known; of fewer it may be anything up to N.
        counts = [symbol for symbol in self.counted if symbol in expr.free_symbols]
        if not counts or len(counts) != len(self.counted):
            return size
        rest: Any = 0
        for symbol in counts[1:]:
            rest = rest + symbol
        return expr.subs(counts[0], size_expr(self.frame.num_rows) - rest).expand()

    def joined(self, left: DimLabels, right: DimLabels) -> DimLabels | None:
        return join(left, right, self.size_of)

    def is_same(self, left: str, right: str) -> bool:
        """Whether two groups of axes name the same, axes of size one aside."""
        return left == right or without_ones(left, self.size_of) == without_ones(right, self.size_of)

    def is_all_tokens(self, labels: DimLabels) -> bool:
        """Whether labels are those of tokens, whatever the shape."""
        return self.is_same(labels.axes, "t")

    def covers_choices(self, labels: DimLabels) -> bool:
        """Whether labels have every assignment once."""
        return self.is_same(labels.axes, "r") or sorted(without_ones(labels.axes, self.size_of)) == sorted(
            without_ones("tk", self.size_of)
        )

    def note_made(self, node: fx.Node) -> None:
        """A matrix was read that each expert makes when it runs."""
        self._sinking.computed_tables[node] = ""

    def check_num_experts(self, num_experts: int, call: Call | None = None) -> None:
        if self.num_experts not in (None, num_experts):
            node = None if call is None else call.node
            raise CannotChunk(
                Reason.ROWS_NOT_FOLLOWED,
                f"tables of {self.num_experts} and of {num_experts} experts in one region",
                node,
            )
        self.num_experts = num_experts

    def note_use(self, ids: Ids, use: IdUse) -> None:
        """Record how ids are read that may be out of range: that decides what those outside [0, E) do."""
        if ids.names == "e" and ids.bound is None:
            self.unbounded_uses.add(use)

    def last_without_zeros(self, node: fx.Node) -> fx.Node:
        """Return the last node before one that lost the zeros of experts which a token did not choose, or the node."""
        before = self.flow.ancestors([node])
        return next((lost for lost in reversed(self.without_zeros) if lost in before), node)

    def check_distinct(self, call: Call) -> None:
        """Refuse a sum over all experts where a token may name one twice: it holds that expert's result once.

        Raises:
            CannotChunk: it is not proved that a token's choices are different experts.
        """
        if not self.frame.is_distinct:
            raise call.refused(
                Reason.COMBINE_NOT_FOLLOWED,
                "a token may name an expert twice here, and a sum over all experts would hold its result once",
            )

    def note_experts(self, call: Call, family: str, width: Size | None = None) -> None:
        """An expert's projection was read: which spelling it has, and its inner width."""
        self.expert_nodes[call.node] = None
        self.family = self.family or family
        if width is not None:
            self.widths.append(int(width))

    def as_rows(self, value: Any, call: Call) -> Rows:
        """A value as rows; a leaf takes the role its shape gives it, a sum is complete when it is read.

        Raises:
            CannotChunk: it is none.
            Exit: the sum was the exit.
        """
        if isinstance(value, Rows):
            return value
        if isinstance(value, Partial):
            if value.node is call.node:  # the node's own result is something else
                raise call.refused(Reason.RESULTS_APART, "a sum over experts is read by the operation that makes it")
            return self.whole(value)
        if isinstance(value, Leaf):
            try:
                return self._resolved(value.node, call)
            except CannotChunk as refusal:
                raise value.why or refusal from refusal
        if isinstance(value, Unknown):
            raise value.refusal
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"{type(value).__name__.lower()} {value} used as row data")

    def whole(self, value: Partial) -> Rows:
        """A sum of results that is complete because something reads it.

        Raises:
            CannotChunk: results of some copies are missing, or copies differ.
            Exit: it is the exit.
        """
        # A sum does not care in which order a copy held its rows.
        by_iteration = {iteration.unordered: expr for iteration, expr in value.parts}
        choices = range(self.frame.top_k) if next(iter(by_iteration)).choice is not None else (None,)
        num_experts = 1 + max(iteration.expert or 0 for iteration in by_iteration)
        iterations = [LoopIteration(expert, choice) for choice in choices for expert in range(num_experts)]
        missing = [iteration.expert for iteration in iterations if iteration not in by_iteration]
        if missing:
            raise CannotChunk(
                Reason.RESULTS_APART,
                f"expert {missing[0]} of {num_experts} does not write its results back",
                value.node,
            )
        results = [by_iteration[iteration] for iteration in iterations]
        # A shared expert that was added to the same sum is no copy of the routed ones.
        num_alike = self.expressions.num_alike(iterations, results, value.node)
        alike = (
            value.first(num_alike)
            if value.labels is None and num_alike > 1 and list(by_iteration) == iterations
            else None
        )
        if alike is not None:
            return self.whole(alike)  # the others add to these experts' sum
        expr = self.expressions.unify(iterations, results, value.node)
        self.num_experts = num_experts
        if value.labels is None:
            raise Exit(value.node, Combined(expr, value.base))
        order = value.parts[0][0].order if value.labels is DimLabels.SORTED else ""
        whole = Rows(value.labels, expr, iteration=LoopIteration(order=order), is_dispatched=True)
        if self.frame.top_k == 1 and self.is_all_tokens(value.labels) and not self._has_experts_behind(value.node):
            raise Exit(value.node, whole)
        return whole

    def as_parameter(self, value: Any, call: Call) -> Rows:
        """A value as a tensor that is the same for all rows: a leaf is read whole, whatever its shape looks like."""
        if isinstance(value, Leaf) and self._sinking.is_made_of_parameters(value.node):
            return Rows(DimLabels.NONE, self.expressions.input(Input("whole", value.node)), per_row=False)
        return self.as_rows(value, call)

    def part_of_table(self, value: Leaf, num_experts: int, call: Call) -> fx.Node:
        """An expert's part, flat, of a tensor in which experts stand one behind the other.

        Raises:
            CannotChunk: it is not contiguous, so that the parts are no views.
        """
        tensor = node_value(value.node)
        assert isinstance(tensor, torch.Tensor)
        if not tensor.is_contiguous():
            raise call.refused(Reason.ROWS_NOT_FOLLOWED, "packed parts of experts that are not contiguous")
        self.check_num_experts(num_experts, call)
        return self.expressions.input(Input("table", value.node, dim=FLAT))

    def whole_of(self, value: Leaf) -> fx.Node:
        """A tensor that is the same for all experts."""
        return self.expressions.input(Input("whole", value.node))

    def without_gradients(self, value: Rows, dtype: torch.dtype) -> Rows:
        """The same numbers, through which no gradient goes in a body's backward; for what `can_stop` allows.

        NOTE: a view as integers and back. `detach` would be lost: bodies are traced without gradients first, where
        torch 2.15 records it as an alias, which stops nothing.
        """
        bits = self.emit(aten.view.dtype, value.expr, _INTEGERS[dtype])
        return replace(value, expr=self.emit(aten.view.dtype, bits, dtype))

    def is_parameter(self, value: Any) -> bool:
        """Whether a value is made of parameters alone."""
        if isinstance(value, Leaf):
            return self._sinking.is_made_of_parameters(value.node)
        return isinstance(value, Rows) and not value.per_row

    def as_tokens(self, value: Any, call: Call) -> Rows:
        """A value as a table with one entry a token."""
        if not isinstance(value, Leaf):
            return self.as_rows(value, call)
        tensor = node_value(value.node)
        assert isinstance(tensor, torch.Tensor)
        # [B,S,H] keeps both dimensions, so that flattening later is seen as a regrouping.
        has_dims = len(self.frame.token_shape) == 2 and tensor.ndim > 2 and _starts_with(tensor, self.frame.token_shape)
        return Rows(
            DimLabels("b", "s") if has_dims else DimLabels.TOKEN, self.expressions.input(Input("rows", value.node))
        )

    def as_table(self, value: Any, call: Call, dim: int = 0) -> Rows:
        """A value as a table of one entry per expert, which a leaf may hold along any dimension."""
        if isinstance(value, Rows) and value.labels.groups[:1] == ("e",) and not value.per_row:
            return value
        if not isinstance(value, Leaf):
            raise call.refused(
                Reason.ROWS_NOT_FOLLOWED, "expected a table of expert parameters, [E,...], from outside the region"
            )
        table = node_value(value.node)
        assert isinstance(table, torch.Tensor)
        num_experts = static_size(table.shape[dim])
        if num_experts is None:
            raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"number of experts is symbolic: {table.shape[dim]}")
        self.check_num_experts(num_experts, call)
        expr = self.expressions.input(Input("table", value.node, dim=dim))
        return Rows(DimLabels.EXPERT, self.emit(aten.unsqueeze.default, expr, 0), per_row=False, is_dispatched=True)

    def entry(self, value: Leaf, place: int, call: Call) -> Rows | None:
        """Entry `place` of a table of parameters; None where the leaf is none."""
        if not self._sinking.is_made_of_parameters(value.node):
            return None
        expr = self.expressions.input(Input("entry", value.node, place))
        return Rows(DimLabels.NONE, expr, per_row=False, is_dispatched=True)

    def as_weights(self, value: Leaf, num_experts: Size | None = None) -> Rows | None:
        """A leaf as weights of each choice, or of each of `num_experts` experts; None where it is neither."""
        tensor, frame = node_value(value.node), self.frame
        assert isinstance(tensor, torch.Tensor)
        # A parameter of [T,K] by accident of sizes is trained, and no decision of a router.
        if isinstance(tensor, torch.nn.Parameter) or not is_float_tensor(value.node):
            return None
        labels = self._labels_of_choices(tensor) if frame.has_choices else None
        if labels is not None and labels.groups[-1] == "k":
            return Rows(labels, self.expressions.input(Input("weight", value.node)))
        return self.weights_of_experts(
            value, self.num_experts or frame.num_experts if num_experts is None else num_experts
        )

    def are_counts(self, sizes: Any) -> bool:
        """Whether sizes are the numbers of rows of all experts, in order."""
        if not isinstance(sizes, (list, tuple)) or not sizes:
            return False
        experts = [self.counted.get(size.node.expr) if isinstance(size, torch.SymInt) else None for size in sizes]
        return experts == list(range(len(experts)))

    def weights_of_experts(self, value: Leaf, num_experts: Size | None) -> Rows | None:
        """A leaf as [T,E] weights of every expert; None where its shape is another."""
        tensor = node_value(value.node)
        assert isinstance(tensor, torch.Tensor)
        fits = num_experts is not None and _has_shape(tensor, (*self.frame.token_shape, num_experts))
        if not fits or isinstance(tensor, torch.nn.Parameter) or not is_float_tensor(value.node):
            return None
        tokens = ("t",) if len(self.frame.token_shape) == 1 else ("b", "s")
        return Rows(DimLabels(*tokens, "e"), self.expressions.input(Input("weight", value.node, is_gathered=True)))

    def matrix_of(self, rows: Rows) -> fx.Node:
        """The [a,b] matrix of a parameter whose expression is [1,a,b]."""
        assert not rows.per_row
        return rows.expr if rows.labels is DimLabels.NONE else self.emit(aten.select.int, rows.expr, 0, 0)  # type: ignore[return-value]

    def _resolved(self, outer: fx.Node, call: Call) -> Rows:
        """The role that a leaf's shape gives it."""
        value = node_value(outer)
        assert isinstance(value, torch.Tensor)
        if not is_float_tensor(outer):
            raise call.refused(
                Reason.ROWS_NOT_FOLLOWED, f"an integer tensor from outside the region, {outer}, used as row data"
            )
        is_param = isinstance(value, torch.nn.Parameter)
        # Weights before tokens: [T,K] has the shape of tokens too.
        labels = self._labels_of_choices(value)
        if labels is not None and not is_param:
            return Rows(labels, self.expressions.input(Input("weight", outer)))
        if self._sinking.is_tokens(value) and not is_param:
            return self.as_tokens(Leaf(outer), call)
        is_entry_each = value.ndim >= 2 and static_size(value.shape[0]) == self.num_experts is not None
        if is_entry_each or (value.ndim >= 3 and self._sinking.is_made_of_parameters(outer)):
            return self.as_table(Leaf(outer), call)
        if any(static_size(size) is None for size in value.shape):
            raise call.refused(
                Reason.ROWS_NOT_FOLLOWED,
                f"an input of symbolic shape {tuple(value.shape)} is neither tokens nor weights",
            )
        return Rows(DimLabels.NONE, self.expressions.input(Input("whole", outer)), per_row=False)

    def _labels_of_choices(self, tensor: torch.Tensor) -> DimLabels | None:
        """Return the labels of a tensor with a number for each choice, its tokens in their own or in one dimension."""
        frame = self.frame
        if _has_shape(tensor, (*frame.token_shape, frame.top_k)):
            return replace(frame, has_choices=True).labels
        if frame.top_k == 1 and _has_shape(tensor, frame.token_shape):
            return replace(frame, has_choices=False).labels
        return DimLabels("t", "k") if _has_shape(tensor, (frame.num_tokens, frame.top_k)) else None

    def _has_experts_behind(self, node: fx.Node) -> bool:
        """Whether a later matmul of what stands here reads more that the routing decides."""
        behind = {other for other in self.flow.descendants([node]) if self.flow.position[other] < self._end}
        reached = self.flow.descendants([self.frame.index]) - behind - {node}
        return any(
            self._sinking.is_matmul(other)
            and any(source in reached or self._sinking.is_table(source) for source in other.all_input_nodes)
            for other in behind
            if any(source in behind or source is node for source in other.all_input_nodes)
        )


_INTEGERS = {
    torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16,
}  # fmt: skip


def can_stop(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a value is an expression of parameters alone, through which gradients can be stopped."""
    return isinstance(value, Rows) and not value.per_row and value.expr is not None and tensor.dtype in _INTEGERS


def _has_shape(value: torch.Tensor, shape: tuple[Size | None, ...]) -> bool:
    return value.ndim == len(shape) and _starts_with(value, shape)


def _starts_with(value: torch.Tensor, shape: tuple[Size | None, ...]) -> bool:
    return all(size is not None and same_size(size, own) for size, own in zip(shape, value.shape, strict=False))
