"""Whether the copies of an unrolled loop compute the same, and which parameter of each stands in which slot.

The copy of expert 0 and that of expert e are walked side by side from their results. Operations and constants
must agree; where one copy reads parameter p and the other q, p and q stand in one slot. A slot holds
    one tensor per expert        W_0, W_1, ...  (an nn.ModuleList of experts)
    entries of one table         W[0], W[1], ...
    one tensor for all experts   the same node in every copy
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.tensors import tree_flatten
from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import node_value, static_size
from memfine_fx.passes.loops.values import Copy, Entry, Loop
from memfine_fx.records import ParamKind

__all__ = ["Slot", "row_count_owner", "unify"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Slot:
    """A parameter of the expert function.

    Args:
        node: what the copy of expert 0 reads.
        kind: "each", "expert" or "shared".
        tensors: one node per expert, the table, or the shared tensor; of the normalised region.
    """

    node: fx.Node
    kind: ParamKind
    tensors: tuple[fx.Node, ...]


def unify(loop: Loop, copies: Sequence[Copy], results: Sequence[fx.Node], same_input: Any) -> list[Slot]:
    """The slots of the copies that end in `results`.

    Args:
        loop: the region, read.
        copies: all experts in order, for one choice after the other where the loop runs over choices too.
        results: each copy's result.
        same_input: whether two placeholders hold the same tensor.

    Raises:
        CannotChunk: two copies differ, or a slot mixes tables and tensors.
    """
    walks = [_Walk(loop, copies[0], copy, same_input) for copy in copies]
    for walk, result in zip(walks, results, strict=True):
        walk.pair(results[0], result)
    num_experts = 1 + max(expert for expert, _ in copies)
    for walk in walks[num_experts:]:
        walk.check_same_slots(walks[walk.expert])
    slots = [_slot(node, [walk.slots[node] for walk in walks[:num_experts]], same_input) for node in walks[0].slots]
    visited = {node for walk in walks for node in walk.visited.values()}
    for slot in slots:
        outside = [user for user in slot.node.users if user not in visited]
        if slot.kind != "shared" and outside:
            raise CannotChunk("an expert's parameter is also used outside the loop over experts", outside[0])
    return slots


def row_count_owner(loop: Loop, node: fx.Node) -> Copy | None:
    """The copy whose number of rows a size is, or None."""
    value = node_value(node)
    if not isinstance(value, torch.SymInt):
        return None
    if node.target is aten.sym_size.int and node.args[1] == 0:
        source = node.args[0]
        held = loop.value(source)
        if held is None:
            return loop.owners.get(source)  # type: ignore[arg-type]  # a node
        return held.copy if isinstance(held, Entry) else _copy_of(held)
    expert = loop.counts.get(value.node.expr)
    return None if expert is None else (expert, None)


def _copy_of(held: Any) -> Copy | None:
    expert = getattr(held, "expert", None)
    return None if expert is None else (expert, getattr(held, "choice", None))


@dataclass
class _Walk:
    """The first copy beside another."""

    loop: Loop
    first: Copy
    copy: Copy
    same_input: Any
    slots: dict[fx.Node, tuple[fx.Node, int | None]] = field(default_factory=dict)
    visited: dict[fx.Node, fx.Node] = field(default_factory=dict)
    known_same: dict[tuple[fx.Node, fx.Node], bool] = field(default_factory=dict)

    @property
    def expert(self) -> int:
        return self.copy[0]

    def check_same_slots(self, other: _Walk) -> None:
        """Another choice's copy of the same expert reads the same parameters."""
        for node, (tensor, entry) in self.slots.items():
            known, known_entry = other.slots[node]
            if entry != known_entry or not self._is_same(tensor, known):
                raise CannotChunk(f"expert {self.expert} differs between a token's choices", node)

    def pair(self, left: fx.Node, right: fx.Node) -> None:
        pending = [(left, right)]
        while pending:
            a, b = pending.pop()
            known = self.visited.get(a)
            if known is not None:
                if known is not b:
                    raise CannotChunk(f"experts 0 and {self.expert} share intermediate results differently", a)
                continue
            self.visited[a] = b
            pending.extend(reversed(self._step(a, b)))

    def _step(self, a: fx.Node, b: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Compare two nodes; the pairs of their inputs that remain."""
        if a is b and isinstance(node_value(a), torch.SymInt):
            return []
        left, right = self.loop.value(a), self.loop.value(b)
        if isinstance(left, Entry) or isinstance(right, Entry):
            self._check_entries(a, left, right)
            return []
        if row_count_owner(self.loop, a) == self.first and row_count_owner(self.loop, b) == self.copy:
            return []
        if a.op == "placeholder" and b.op == "placeholder":
            if isinstance(node_value(a), torch.Tensor):
                self.slots[a] = (b, None)
            elif a is not b:
                raise self._differ(a)
            return []
        one, other = _table_entry(a), _table_entry(b)
        if (
            one is None
            or other is None
            or (one[1], other[1]) != (0, self.expert)
            or not self._is_same(one[0], other[0])
        ):
            return self._inputs(a, b)
        self.slots[a] = (one[0], other[1])
        return []

    def _inputs(self, a: fx.Node, b: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        if a.target != b.target or a.op != b.op:
            raise self._differ(a)
        leaves_a, spec_a = tree_flatten((a.args, a.kwargs))
        leaves_b, spec_b = tree_flatten((b.args, b.kwargs))
        if spec_a != spec_b:
            raise self._differ(a)
        pairs = []
        for one, other in zip(leaves_a, leaves_b, strict=True):
            if isinstance(one, fx.Node) and isinstance(other, fx.Node):
                pairs.append((one, other))
            elif isinstance(one, fx.Node) or isinstance(other, fx.Node) or one != other:
                raise self._differ(a)
        return pairs

    def _check_entries(self, a: fx.Node, left: Any, right: Any) -> None:
        is_pair = isinstance(left, Entry) and isinstance(right, Entry) and left.by == right.by
        if not is_pair or left.has_column is not right.has_column or (left.copy, right.copy) != (self.first, self.copy):
            raise CannotChunk(f"experts 0 and {self.expert} take their rows in different ways", a)
        if not self._is_same(left.source, right.source):
            raise CannotChunk(f"experts 0 and {self.expert} take their rows from different tensors", a)

    def _is_same(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two nodes hold the same value: one node, or the same computation twice."""
        if a is b:
            return True
        if (a, b) not in self.known_same:
            self.known_same[a, b] = self._compute_same(a, b)
        return self.known_same[a, b]

    def _compute_same(self, a: fx.Node, b: fx.Node) -> bool:
        if a.op == "placeholder" and b.op == "placeholder":
            return bool(self.same_input(a, b))
        if a.op != b.op or a.target != b.target:
            return False
        leaves_a, spec_a = tree_flatten((a.args, a.kwargs))
        leaves_b, spec_b = tree_flatten((b.args, b.kwargs))
        return spec_a == spec_b and all(
            self._is_same(one, other) if isinstance(one, fx.Node) and isinstance(other, fx.Node) else one == other
            for one, other in zip(leaves_a, leaves_b, strict=True)
        )

    def _differ(self, node: fx.Node) -> CannotChunk:
        return CannotChunk(f"experts 0 and {self.expert} compute different things", node)


def _table_entry(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(table, expert) of W[e]."""
    if node.target is aten.select.int and node.args[1] == 0 and isinstance(node.args[2], int):
        return node.args[0], node.args[2]  # type: ignore[return-value]  # a node
    source = node.args[0] if node.target is operator.getitem else None
    is_unbound = isinstance(source, fx.Node) and source.target is aten.unbind.int and source.args[1:] in ((), (0,))
    return (source.args[0], node.args[1]) if is_unbound else None  # type: ignore[return-value,union-attr]  # a node


def _slot(node: fx.Node, members: list[tuple[fx.Node, int | None]], same_input: Any) -> Slot:
    tensors = tuple(tensor for tensor, _ in members)
    entries = [entry for _, entry in members]
    if entries == list(range(len(members))) and _table_entry(node) is not None:
        return Slot(node, "expert", tensors[:1])
    if any(entry is not None for entry in entries):
        raise CannotChunk("some experts read a table, others tensors of their own", node)
    if all(tensor is tensors[0] or same_input(tensor, tensors[0]) for tensor in tensors):
        if any(static_size(size) is None for size in node_value(tensors[0]).shape):  # type: ignore[attr-defined]  # a tensor
            raise CannotChunk("the experts read all tokens at once", node)
        return Slot(node, "shared", tensors[:1])
    if len({_layout(tensor) for tensor in tensors}) > 1:
        raise CannotChunk("the experts' parameters differ in shape, strides or dtype", node)
    return Slot(node, "each", tensors)


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value = node_value(node)
    assert isinstance(value, torch.Tensor)
    return tuple(map(str, value.shape)), tuple(map(str, value.stride())), value.dtype, value.device
