"""Roll: an unrolled loop over experts becomes one copy of the expert on all routed rows in expert order.

Before:  for each expert e:  rows = x[places of e];  y = f(rows, W_e) * w[places of e];  out.index_add_(0, t, y)
After:   order = sort(index);  y = f(x[order // K], W_0) * w[order];  out = zeros.index_add(0, order // K, y)

Steps: read the loop (`values`); check that all experts 0 .. E-1 write back once and compute the same
(`unify`); retrace the region with one copy. The parameters of the copy are those of expert 0; `Rolled.slots`
says what they stand for. The result is an ordinary normalised region: its rows are proved independent, and
its expert function is written, by the same rules as for every other spelling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memfine_fx.compat.autograd import enable_python_dispatcher, without_autocast
from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import has_unbacked_rows, is_top_k_index, node_value, target_name
from memfine_fx.passes.loops.marker import one_expert
from memfine_fx.passes.loops.unify import Slot, row_count_owner, unify
from memfine_fx.passes.loops.values import AllPlaces, Copy, Entry, Loop, Sum, is_zeros, read_loop
from memfine_fx.passes.normalize import NormalizedRegion, fake_mode_of
from memfine_fx.records import ParamKind

__all__ = ["Rolled", "RolledParam", "is_loop", "is_same_view", "roll"]


@dataclass(frozen=True)
class RolledParam:
    """What a parameter of the one copy stands for; `nodes` are outer nodes."""

    kind: ParamKind
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Rolled:
    """A loop as a region with one copy of its expert.

    Args:
        region: the copy on all routed rows; its parameters are expert 0's.
        params: what they stand for, by the outer node that stands in `region.inputs`.
        num_experts: E.
    """

    region: NormalizedRegion
    params: dict[fx.Node, RolledParam]
    num_experts: int


def is_loop(region: NormalizedRegion) -> bool:
    """Whether something in the region has as many rows as the routing gives one expert."""
    return any(has_unbacked_rows(node) for node in region.graph_module.graph.nodes)


def roll(region: NormalizedRegion, expert_index: fx.Node, num_token_dims: int, top_k: int) -> Rolled:
    """Roll the loop of a region.

    Args:
        region: a cut as functional ATen.
        expert_index: the outer node with the ids.
        num_token_dims: 1 where tokens are [T], 2 where they are [B,S].
        top_k: K.

    Raises:
        CannotChunk: the loop is not read, its experts differ, or some do not run.
    """
    graph = region.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    outer = dict(zip(placeholders, region.inputs, strict=True))
    index = next(node for node in placeholders if outer[node] is expert_index)
    loop = read_loop(graph, index, num_token_dims, top_k, is_distinct=is_top_k_index(expert_index) or top_k == 1)
    roller = _Roller(loop, outer)
    output = next(iter(reversed(graph.nodes))).args[0]
    assert isinstance(output, fx.Node), "a region returns one tensor"
    roller.prepare(output)
    return roller.rolled(output)


class _Roller:
    def __init__(self, loop: Loop, outer: dict[fx.Node, fx.Node]) -> None:
        self._loop = loop
        self._outer = outer
        self._slots: dict[fx.Node, Slot] = {}
        self._inputs: dict[fx.Node, None] = {loop.index: None}
        self._num_experts = max(loop.experts, default=-1) + 1

    def prepare(self, output: fx.Node) -> None:
        """Unify every complete sum that the output needs; collect what the one copy reads."""
        pending, seen = [output], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder" or node in self._slots:
                self._inputs[node] = None
            else:
                pending.extend(self._needed(node))

    def rolled(self, output: fx.Node) -> Rolled:
        inputs = list(self._inputs)
        values = [node_value(node) for node in inputs]
        fake_mode = fake_mode_of(values)
        assert fake_mode is not None, "regions are traced on fake tensors"

        def copy(*args: Any) -> Any:
            return _Copy(self._loop, self._num_experts, dict(zip(inputs, args, strict=True))).evaluate(output)

        try:
            with torch.no_grad(), enable_python_dispatcher(), fake_mode, without_autocast():
                traced = make_fx(torch.func.functionalize(copy, remove="mutations"), tracing_mode="real")(*values)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CannotChunk(f"retracing the loop's body failed: {error}", output) from error
        traced.graph.eliminate_dead_code()
        traced.recompile()
        stand_ins = {node: self._stand_in(node) for node in inputs}
        params = {
            stand_ins[node]: RolledParam(slot.kind, tuple(self._outer_of(tensor) for tensor in slot.tensors))
            for node, slot in self._slots.items()
        }
        if len(params) < len(self._slots):
            raise CannotChunk("one table of experts is read in two ways", output)
        return Rolled(NormalizedRegion(traced, tuple(stand_ins.values())), params, self._num_experts)

    def _stand_in(self, node: fx.Node) -> fx.Node:
        slot = self._slots.get(node)
        return self._outer_of(node if slot is None else slot.tensors[0])

    def _outer_of(self, node: fx.Node) -> fx.Node:
        if node not in self._outer:
            raise CannotChunk("a table of experts is computed inside the region", node)
        return self._outer[node]

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        value = self._loop.value(node)
        if isinstance(value, Sum):
            self._unify(value, node)
            own = [dict(value.parts)[self._first(value)]]
            return own if value.base is None else [*own, value.base]
        if isinstance(value, Entry):
            return [value.source]
        if isinstance(value, AllPlaces):
            return []
        if self._loop.owners.get(node, (0, None)) not in _FIRST:
            raise CannotChunk(f"results of expert {self._loop.owners[node][0]} are used apart from the others'", node)
        if row_count_owner(self._loop, node) is not None:
            return []
        return list(node.all_input_nodes)

    def _first(self, value: Sum) -> Copy:
        return min((copy for copy, _ in value.parts), key=_by_choice)

    def _unify(self, value: Sum, node: fx.Node) -> None:
        parts = dict(value.parts)
        has_choices = self._first(value)[1] is not None
        choices = range(self._loop.top_k) if has_choices else (None,)
        copies = [(expert, choice) for choice in choices for expert in range(self._num_experts)]
        missing = [expert for expert, choice in copies if (expert, choice) not in parts]
        if missing:
            raise CannotChunk(f"expert {missing[0]} of {self._num_experts} does not write its results back", node)
        for slot in unify(self._loop, copies, [parts[copy] for copy in copies], self._is_same_input):
            known = self._slots.setdefault(slot.node, slot)
            if known != slot:
                raise CannotChunk("a parameter stands in two slots", slot.node)

    def _is_same_input(self, left: fx.Node, right: fx.Node) -> bool:
        return left is right or is_same_view(self._outer[left], self._outer[right])


def _by_choice(copy: Copy) -> tuple[int, int]:
    return copy[1] or 0, copy[0]


def is_same_view(left: fx.Node, right: fx.Node) -> bool:
    """Whether two outer nodes are the same view of the same tensor."""
    if left is right:
        return True
    if left.op not in ("call_function", "call_method") or target_name(left) not in _VIEWS:
        return False
    if (left.op, left.target, left.kwargs) != (right.op, right.target, right.kwargs):
        return False
    return len(left.args) == len(right.args) and all(
        is_same_view(a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) else a == b
        for a, b in zip(left.args, right.args, strict=True)
    )


_FIRST = ((0, None), (0, 0))
_VIEWS = frozenset("view reshape transpose permute t getattr unflatten".split())


class _Copy:
    """Runs one copy of the loop's body on all routed rows in expert order."""

    def __init__(self, loop: Loop, num_experts: int, inputs: dict[fx.Node, Any]) -> None:
        self._loop = loop
        self._num_experts = num_experts
        self._env = dict(inputs)
        self._index = inputs[loop.index]
        flat = self._index.reshape(-1)
        self._order = torch.sort(flat, stable=True)[1]
        self._tokens = torch.div(self._order, loop.top_k, rounding_mode="floor")

    def evaluate(self, node: fx.Node) -> Any:
        if node not in self._env:
            self._env[node] = self._run(node)
        return self._env[node]

    def _run(self, node: fx.Node) -> Any:
        value = self._loop.value(node)
        if isinstance(value, Sum):
            return self._combine(value, node)
        if isinstance(value, Entry):
            return self._take(value)
        if isinstance(value, AllPlaces):
            return self._every_place(value, node)
        if row_count_owner(self._loop, node) is not None:
            return self._order.shape[0]
        assert node.op == "call_function" and callable(node.target)
        target: Callable[..., Any] = node.target
        return target(*fx.map_arg(node.args, self.evaluate), **fx.map_arg(node.kwargs, self.evaluate))

    def _every_place(self, places: AllPlaces, node: fx.Node) -> torch.Tensor:
        if places.count != self._num_experts:
            raise CannotChunk(f"places of {places.count} experts of {self._num_experts} put together", node)
        return self._tokens if places.dim == "t" else self._order

    def _take(self, entry: Entry) -> torch.Tensor:
        source = self.evaluate(entry.source)
        if entry.by == "sorted":
            return one_expert(source)  # type: ignore[no-any-return]  # custom_op is untyped
        rows = self._rows_of(source, entry.by)
        return rows.unsqueeze(-1) if entry.has_column else rows

    def _rows_of(self, source: torch.Tensor, by: str) -> torch.Tensor:
        if by == "gate":
            return torch.gather(source, -1, self._index).reshape(-1)[self._order]
        if by in ("bs", "bsk"):
            source = source.flatten(0, 1)
        if by in ("t", "bs"):
            return source[self._tokens]
        if by == "n":
            return source[self._order]
        return _flat(source)[self._order].reshape(self._order.shape[0], *source.shape[2:])

    def _combine(self, value: Sum, node: fx.Node) -> torch.Tensor:
        results = self.evaluate(min(value.parts, key=lambda part: _by_choice(part[0]))[1])
        if value.base is None:
            return results  # type: ignore[no-any-return]  # a tensor
        base = self.evaluate(value.base)
        if value.by == "t":
            return torch.index_add(base, 0, self._tokens, results.to(base.dtype))
        if value.by == "bs":
            return self._added_to_blank(base, results, value.base)
        num_rows = math.prod(base.shape[: base.ndim - results.ndim + 1])
        if value.by != "n" or num_rows != self._order.shape[0]:
            raise CannotChunk(f"results written back by {value.by}", node)
        inverse = torch.empty_like(self._order)
        inverse[self._order] = torch.arange(self._order.shape[0], device=inverse.device)
        put = results[inverse]
        return put if put.ndim == base.ndim else put.reshape(base.shape)  # type: ignore[no-any-return]  # a tensor

    def _added_to_blank(self, base: torch.Tensor, results: torch.Tensor, node: fx.Node) -> torch.Tensor:
        """Rows summed to tokens [B,S,...]; what they are added to must be zeros, which are made again, flat."""
        if not is_zeros(node):
            raise CannotChunk("rows are added to tokens [B,S,...] that are not fresh", node)
        blank = base.new_zeros((base.shape[0] * base.shape[1], *base.shape[2:]))
        return torch.index_add(blank, 0, self._tokens, results.to(base.dtype)).reshape(base.shape)


def _flat(source: torch.Tensor) -> torch.Tensor:
    """[T,K,...] -> [N,...]; one number per choice becomes [N], which K = 1 cannot confuse with [T,K]."""
    if all(size == 1 for size in source.shape[2:]):
        return source.reshape(-1)
    return source.flatten(0, 1)
