"""One walk: from a routing decision through Dynamo's graph to the first complete combine.

Nodes run in graph order as functional ATen (`normal_form`), each if something that the routing decides reaches it;
every call gets a value by the one table of rules. What nobody can prove is `Unknown` until it is needed. At the end of
each of Dynamo's nodes, whatever is no part of the experts is a `Leaf` again: routing weights, masks for a loss, the
routing's own arithmetic stay outside the region, however they were computed.

What the routing does not reach is a leaf too, and its first use decides its role by its shape: tokens, a weight for
each choice or expert, a table of parameters, a parameter that all experts share. Leaves that fit no role are *pulled*:
their node runs as part of the region (copies of tokens, entries of tables, results of experts that run on all tokens).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.operators import op_name
from memfine_fx.compat.tensors import tree_leaves, tree_map
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import Dataflow, in_code, is_float_tensor, node_value, same_size, static_size, tensor_of
from memfine_fx.passes.modes import Modes, gradient_stop
from memfine_fx.passes.ops import LIKE_FACTORIES, has_random_tag
from memfine_fx.passes.read.dim_labels import DimLabels
from memfine_fx.passes.read.expressions import Input, RowsDiffer
from memfine_fx.passes.read.frame import Exit, Frame
from memfine_fx.passes.read.normal_form import Call, NormalForm
from memfine_fx.passes.read.roles import Roles, can_stop
from memfine_fx.passes.read.sinking import is_dequantized
from memfine_fx.passes.read.values import (
    Combined,
    Ids,
    Leaf,
    Mask,
    Part,
    Partial,
    Rows,
    Unknown,
    is_dispatched,
)

__all__ = ["Args", "Kwargs", "Reader", "Rule"]

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[["Reader", Call, Args, Kwargs], Any]
"""(reader, call, values of its arguments) -> the value of its result, a list where it has several; see `rules`."""


class Reader(Roles):
    """Reads what one routing decision does.

    Args:
        flow: of Dynamo's graph; not changed.
        modes: of every node.
        frame: where to start.
        rule_of: the rule of an overload, or None; the second argument says whether it works on packed numbers.
        forced: nodes that run as part of the region although they look like tokens.
        expands_tables: whether computed tables of parameters stay outside, to be read whole.
    """

    def __init__(
        self,
        flow: Dataflow,
        modes: dict[fx.Node, Modes],
        frame: Frame,
        rule_of: Callable[[Any, bool], Rule | None],
        forced: frozenset[fx.Node] = frozenset(),
        *,
        expands_tables: bool = False,
    ) -> None:
        super().__init__(flow, frame, forced, expands_tables=expands_tables)
        self.refusals: list[CannotChunk] = []
        self.left_outside: dict[fx.Node, CannotChunk] = {}
        self.indices: list[fx.Node] = []
        self.masks: list[fx.Node] = []
        self.ran: dict[fx.Node, None] = {}
        self.stops: list[fx.Node] = []
        self._is_unpacking = False
        self._rule_of = rule_of
        self._values: dict[int, tuple[torch.Tensor, Any]] = {}
        self._form = NormalForm(flow.graph, modes, self._notice_call)

    @property
    def has_computed_tables(self) -> bool:
        """Whether tables were read as something that is computed expert by expert."""
        return any(not why for why in self._sinking.computed_tables.values())

    @property
    def why_expanded(self) -> str:
        """Why a table that is computed was read whole all the same, "" where none was."""
        return next(filter(None, self._sinking.computed_tables.values()), "")

    def apart(self) -> CannotChunk:
        """The refusal of results that do not meet: at the graph's end behind the last of them, or at that itself."""
        nodes = [node for node in self.ran if any(map(is_dispatched, self._operands_at(node)))]
        last = nodes[-1] if nodes else self.frame.index
        end = next((user for user in last.users if user.op == "output"), last)
        details = "the experts' results do not meet in one [T,H] tensor"
        return CannotChunk(Reason.RESULTS_APART, details, in_code(end, last))

    def obstacle(self) -> CannotChunk | None:
        """Why the walk stopped at the first node that leads to vectors of tokens and that no rule explains.

        What leads to other shapes alone, such as a loss that balances experts, is in nobody's way. None where nothing
        leads to such vectors.
        """
        stopped = self.left_outside | {refusal.at: refusal for refusal in self.refusals if refusal.at is not None}
        nodes = sorted((node for node in stopped if isinstance(node, fx.Node)), key=self.flow.position.__getitem__)
        ways = (node for node in nodes if any(map(self._is_vectors, self.flow.descendants([node]))))
        first = next(ways, None)
        return None if first is None else stopped[first]

    def _is_vectors(self, node: fx.Node) -> bool:
        """Whether a node holds one vector a token, and no numbers for its choices or for experts."""
        value = node_value(node)
        if not is_float_tensor(node) or not isinstance(value, torch.Tensor) or value.ndim < 2:
            return False
        width, counts = static_size(value.shape[-1]), (1, self.frame.top_k, self.frame.num_experts)
        return width not in counts and self._is_one_vector_a_token(value)

    # The walks.

    def read(self, later: set[fx.Node]) -> Exit | None:
        """Walk until the exit, or one of the `later` routing decisions, or the graph's end.

        Raises:
            RowsDiffer: results of experts were taken for tokens; read again with those nodes forced.
        """
        exits: list[Exit] = []
        # The next decision's experts are another region, and its rows would be taken for these.
        self._end = min(map(self.flow.position.__getitem__, later), default=self._end)

        def walk() -> None:
            try:
                self._walk()
            except Exit as exit_found:
                exits.append(exit_found)

        self._form.reading(walk)
        return exits[0] if exits else None

    def _walk(self) -> None:
        # Nothing before the decision depends on it.
        start = self.flow.position[self.frame.index]
        self._give_tensor(next(self._form.tensors(self._form.result(self.frame.index))), self._index_ids())
        for node in list(self.flow.graph.nodes)[start + 1 : self._end]:
            if node.op == "output":
                self._finish_sums(node)
            elif node.op in ("call_function", "call_method") and any(map(self._is_active, node.all_input_nodes)):
                self._run(node)
        self._finish_sums(None)

    def _index_ids(self) -> Ids | Mask:
        frame = self.frame
        if frame.is_mask:
            return Mask(DimLabels(*frame.labels.groups, "e"), is_distinct=frame.is_distinct)
        return Ids("e", frame.labels, is_distinct=frame.is_distinct, bound=frame.bound)

    def _is_active(self, node: fx.Node) -> bool:
        """Whether something stands at a node that is more than a tensor from outside."""
        result = self._form.result(node)
        # Lengths of an expert's rows are symbols that only its mask knows; other sizes are anybody's.
        if isinstance(result, torch.SymInt):
            return result.node.expr in self.counted
        if not isinstance(result, torch.Tensor) and not self._form.holds(node):
            return False
        return any(not isinstance(self._value_of(tensor, node), Leaf) for tensor in self._form.tensors(result))

    def _run(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            self._pull(source, self.flow.position[node])
        self._operand_values(node)  # leaves are identified by their nodes
        self.ran[node] = None
        try:
            self._form.run(node)
        except RowsDiffer:
            raise
        except CannotChunk as refusal:
            self._set_all(node, self._unknown(refusal.placed(node), self._operand_values(node)))
            return
        self._settle(node)

    def _pull(self, node: fx.Node, at: int) -> None:
        """Run a node that must be part of the region, and what it needs, for one that runs at position `at`."""
        is_slots = self.slots is not None and node is self.slots.root
        if is_slots or self._form.holds(node):
            return
        packed = self._sinking.packed_numbers(node, at)
        if packed and self._unpack(node, packed):
            return
        if not self._sinking.wants(node, self.ran, at):
            return
        for source in node.all_input_nodes if not is_dequantized(node) else ():  # packed numbers have no role in rows
            self._pull(source, at)
        self._operand_values(node)
        self.ran[node] = None
        num_experts = self.num_experts
        try:
            self._form.run(node)
        except RowsDiffer:
            raise
        except CannotChunk as refusal:
            self._note_leaf(node, refusal)
            return
        self._settle(node, is_pulled=True)
        for value in self._operands_at(node):
            if isinstance(value, Leaf):
                self._note_leaf(node, value.why)
                self.num_experts = num_experts  # what did not work out says nothing

    def _unpack(self, node: fx.Node, made_of: list[fx.Node]) -> bool:
        """Run what makes a table of packed numbers, on one expert's part of them; whether that could be followed."""
        # The walk may not know E yet; what fails here must not have decided it.
        before, num_experts = self.num_experts, int(tensor_of(node).shape[0])
        if before not in (None, num_experts):
            return False
        # The rules for parts divide first dimensions by it.
        self.num_experts = num_experts
        self._sinking.computed_tables[node] = ""
        new = [call for call in made_of if not self._form.holds(call)]
        self._is_unpacking = True
        try:
            for packed_call in new:
                self._operand_values(packed_call)
                self._form.run(packed_call)
            (table,) = self._operands_at(node)  # as it is after all writes
        except CannotChunk as refusal:
            table = Unknown(refusal, is_dispatched=False)
        finally:
            self._is_unpacking = False
        if isinstance(table, (Part, Rows)):
            self.ran.update(dict.fromkeys(new))
            return True
        self.num_experts = before
        self._form.forget(new)
        self._note_leaf(node, getattr(table, "refusal", None))
        return False

    def _is_table_of_floats(self, tensor: torch.Tensor) -> bool:
        return tensor.ndim >= 3 and tensor.dtype.is_floating_point and static_size(tensor.shape[0]) == self.num_experts

    def _note_leaf(self, node: fx.Node, why: CannotChunk | None) -> None:
        """A node that was pulled stays a leaf; of a computed table it will be said why."""
        if node in self._sinking.computed_tables:
            self._sinking.computed_tables[node] = str(why or "its operation is not followed")

    def _operand_values(self, node: fx.Node) -> list[Any]:
        return [value for source in node.all_input_nodes for value in self._operands_at(source)]

    def _operands_at(self, node: fx.Node) -> list[Any]:
        return [self._value_of(tensor, node) for tensor in self._form.tensors(self._form.result(node))]

    def _settle(self, node: fx.Node, *, is_pulled: bool = False) -> None:
        """Settle the values of tensors that a node returned or wrote; raise `Exit` where the region ends.

        Some values become leaves again.
        """
        tensors = self._results_of(node)
        self._stop_gradients(node, tensors)
        for tensor in tensors:
            value = self._value_of(tensor, node)
            is_settled = is_pulled and isinstance(value, Rows) and value.expr is not None
            settled = value if is_settled else self._settled(value, tensor, node)
            if settled is not value:
                self._give_tensor(tensor, settled)
            if isinstance(settled, Combined) and not is_pulled and self._is_one_vector_a_token(tensor):
                raise Exit(node, settled)
            if isinstance(settled, Rows) and self._ends_here(settled, tensor, node):
                raise Exit(node, settled)

    def _results_of(self, node: fx.Node) -> list[torch.Tensor]:
        """The tensors that a node gave, and those that it wrote into."""
        nodes = [node, *self.flow.mutations.get(node, ())]
        return [tensor for changed_node in nodes for tensor in self._form.tensors(self._form.result(changed_node))]

    def _stop_gradients(self, node: fx.Node, tensors: Sequence[torch.Tensor]) -> None:
        """Stop gradients in a body, too, behind a node on parameters that lets no gradient through (`detach`)."""
        values = [self._value_of(tensor, node) for tensor in tensors]
        sources = {
            id(operand) for source in node.all_input_nodes for operand in self._form.tensors(self._form.result(source))
        }
        # A node that gives its operand back shares the tensor with it, and the operand's gradients go on.
        if not values or not all(map(can_stop, values, tensors)) or not sources.isdisjoint(map(id, tensors)):
            return
        if gradient_stop([node], self.flow) is not None:
            for tensor, value in zip(tensors, values, strict=True):
                self._give_tensor(tensor, self.without_gradients(value, tensor.dtype))
            self.stops.append(node)

    def _settled(self, value: Any, tensor: torch.Tensor, node: fx.Node) -> Any:
        is_one_tensor = isinstance(node_value(node), torch.Tensor)
        if is_one_tensor and isinstance(value, Mask) and value.is_part:
            if value.labels is DimLabels(*self.frame.labels.groups, "e"):
                self.masks.append(node)
            if self.frame.is_index_like(tensor):
                self.indices.append(node)  # zeros and ones may be read as ids themselves
        # Nothing of the experts is in these, so the graph may compute them before the op.
        is_number = isinstance(value, Rows) and not tensor.dtype.is_floating_point
        if (isinstance(value, Unknown) or is_number) and not value.is_dispatched:
            if is_one_tensor and self.frame.is_index_like(tensor):
                self.indices.append(node)
            if not isinstance(value, Unknown):
                return Leaf(node)
            self.left_outside.setdefault(node, value.refusal)
            return Leaf(node, value.refusal)
        has_rows = isinstance(value, Rows) and (value.is_dispatched or "r" in value.labels.axes)
        if not isinstance(value, Rows) or has_rows or not tensor.dtype.is_floating_point:
            return value
        # A number for each choice is a routing weight however it was computed, and the graph goes on computing it.
        is_choice = (
            value.labels is self.frame.labels and value.labels.num_dims == tensor.ndim and value.iteration.is_all
        )
        if is_choice and value.fill_value is None:
            return Leaf(node)
        is_column = tensor.ndim > value.labels.num_dims + 1 and same_size(tensor.shape[-1], 1)  # of a bmm: no tokens
        is_tokens = value.fill_value is None and self._sinking.is_tokens(tensor) and not is_column
        if value.expr is None or (is_tokens and not self._sinking.wants(node, self.ran, self.flow.position[node])):
            if value.fill_value is not None:
                return self._rooted(value, tensor, node)
            if value.labels.is_dense and value.expr is None:
                unknown = CannotChunk(
                    Reason.NOT_PROVED_ZERO, "weights of experts that a token did not choose may not be zero", node
                )
                self.left_outside.setdefault(node, unknown)
            return Leaf(node)
        return value

    def _rooted(self, value: Rows, tensor: torch.Tensor, node: fx.Node) -> Any:
        """Weights that are known at unchosen entries only: from here on they are this node."""
        if value.iteration.expert is not None and value.iteration.choice is None:
            expr = self.expressions.input(Input("column", node, value.iteration.expert))
        elif value.labels.num_dims == tensor.ndim and self._has_weights_of_experts(value.labels):
            expr = self.expressions.input(Input("weight", node, is_gathered=True))
        else:
            return Leaf(node)
        for _ in range(tensor.ndim - value.labels.num_dims):
            expr = self.emit(aten.unsqueeze.default, expr, 1)
        return replace(value, expr=expr)

    def _has_weights_of_experts(self, labels: DimLabels) -> bool:
        """[T,E], as such weights are gathered; turned ones, [E,T], are read as something else."""
        return labels.groups[-1:] == ("e",) and self.is_all_tokens(labels.without(labels.num_dims - 1))

    def _is_one_vector_a_token(self, tensor: torch.Tensor) -> bool:
        """Whether combined tokens are [T,H], [B,S,H] or [T,1,H] (as of a bmm) now."""
        tokens, shape = self.frame.token_shape, [self.known_size(size) for size in tensor.shape]
        has_one = tensor.ndim == 3 and same_size(shape[1], 1)
        is_flat = (tensor.ndim == 2 or has_one) and same_size(shape[0], self.frame.num_tokens)
        return is_flat or (tensor.ndim == len(tokens) + 1 and all(map(same_size, shape, tokens)))

    def _ends_here(self, value: Rows, tensor: torch.Tensor, node: fx.Node) -> bool:
        """With one choice a token, rows in token order are combined, once no expert of theirs is left to run."""
        if self.frame.top_k != 1 or not value.is_dispatched or not value.per_row or not value.iteration.is_all:
            return False
        # With K = 1 nothing is summed, so no operation marks the end: order and experts do.
        is_tokens = (
            bool(value.labels.groups) and set(value.labels.axes) <= set("tbsk") and "" not in value.labels.groups
        )
        has_columns = tensor.ndim == value.labels.num_dims + 1 and tensor.ndim in (2, len(self.frame.token_shape) + 1)
        ends = is_tokens and has_columns and bool(self.expert_nodes) and not self._has_experts_behind(node)
        return ends and value.expr is not None and not self.expressions.is_of_one_expert(value.expr)

    def _finish_sums(self, output: fx.Node | None) -> None:
        """A sum that nothing but the graph's output reads is complete."""
        sources = self.ran if output is None else output.all_input_nodes
        for node in reversed(list(sources)):
            values = [self._value_of(tensor, node) for tensor in self._form.tensors(self._form.result(node))]
            sums = [value for value in values if isinstance(value, Partial)]
            if sums:  # the last one: those before it hold fewer experts' results
                try:
                    self.whole(sums[0])
                except RowsDiffer:
                    raise
                except CannotChunk as refusal:
                    self.refusals.append(refusal)
                return

    # Values.

    def _notice_call(self, call: Call) -> None:
        def of(leaf: Any) -> Any:
            value = self._value_of(leaf, None) if isinstance(leaf, torch.Tensor) else leaf
            is_table = isinstance(value, Part) and not self._is_unpacking and self._is_table_of_floats(leaf)
            return Rows(DimLabels.EXPERT, value.expr, per_row=False, is_dispatched=True) if is_table else value

        args, kwargs = tree_map(of, (call.args, call.kwargs))
        try:
            result = self._evaluated(call, args, kwargs)
        except RowsDiffer:
            raise
        except CannotChunk as refusal:
            result = self._unknown(refusal.placed(call.node), tree_leaves((args, kwargs)), call.target)
        if getattr(result, "fill_value", 0) != 0 and any(map(_has_zeros, tree_leaves((args, kwargs)))):
            self.without_zeros.append(call.node)
        self._give(call.out, result)

    def _evaluated(self, call: Call, args: Any, kwargs: Any) -> Any:
        operands = tree_leaves((args, kwargs))
        rule = self._rule_of(call.target, self._is_unpacking or any(isinstance(value, Part) for value in operands))
        # The refusal where row data was lost says more than one of something beside it.
        unknown = [value for value in operands if isinstance(value, Unknown)]
        if unknown and op_name(call.target) not in _SHAPES_ONLY:
            dispatched = any(map(is_dispatched, operands))
            return Unknown(
                next((operand for operand in unknown if operand.is_dispatched), unknown[0]).refusal, dispatched
            )
        if rule is None and has_random_tag(call.target):
            raise call.refused(Reason.RANDOM_NUMBERS, "random numbers are drawn inside the experts (dropout)")
        if rule is None:
            raise call.refused(Reason.NO_RULE, f"no row-wise rule for {call.target}")
        return rule(self, call, args, kwargs)

    def _unknown(self, refusal: CannotChunk, operands: Sequence[Any], target: Any = None) -> Unknown:
        # Parameters picked by the routing, and grouped matmuls, belong to the experts even where no rule follows them:
        # left outside, their results would be taken for tokens.
        picks = any(isinstance(value, (Ids, Mask)) for value in operands)
        tables = [value.node for value in operands if isinstance(value, Leaf)]
        dispatched = (
            any(map(is_dispatched, operands))
            or (picks and any(map(self._sinking.is_made_of_parameters, tables)))
            or target is torch.ops.memfine.grouped_mm.default
        )
        if dispatched:
            self.refusals.append(refusal)
        return Unknown(refusal, dispatched)

    def _give(self, out: Any, result: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._give_tensor(out, result)
        elif isinstance(out, (tuple, list)):
            values = result if isinstance(result, (tuple, list)) else [result] * len(out)
            for item, value in zip(out, values, strict=True):
                self._give(item, value)

    def _give_tensor(self, tensor: torch.Tensor, value: Any) -> None:
        self._values[id(tensor)] = tensor, value

    def _set_all(self, node: fx.Node, value: Any) -> None:
        for tensor in self._form.tensors(self._form.result(node)):
            self._give_tensor(tensor, self._settled(value, tensor, node))

    def _value_of(self, tensor: torch.Tensor, node: fx.Node | None) -> Any:
        """Return the value of a tensor; a tensor that no call gave comes from outside, at `node`."""
        known = self._values.get(id(tensor))
        if node is not None and not isinstance(node_value(node), torch.Tensor) and node.target is not operator.setitem:
            node = None  # one of several results: only what takes it out names it
        if known is None and node is None:
            return Unknown(CannotChunk(Reason.ROWS_NOT_FOLLOWED, "a tensor that is made in passing"), False)
        is_leaf = known is None or isinstance(known[1], Leaf)
        if node is not None and is_leaf:  # Dynamo records one tensor for several nodes where a cast does nothing
            known = tensor, Leaf(node, None if known is None else known[1].why)
            self._values[id(tensor)] = known
        assert known is not None
        return known[1]


def _has_zeros(value: Any) -> bool:
    """Whether entries of experts that a token did not choose are zero."""
    return isinstance(value, Rows) and value.labels.is_dense and value.fill_value == 0


_SHAPES_ONLY = LIKE_FACTORIES - {"rand_like", "randn_like", "randint_like"}
"""They read a shape and no number, so what they make is known although their operand is not."""
