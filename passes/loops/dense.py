"""Dense loops: every expert runs on all tokens, and a weight that is zero for the unchosen scales what it gives.

    sums     out = y_0 * w_0 + y_1 * w_1 + ...          one column of weights an expert, [T] or [T,1];
             out = base + y_0 * w_0 + ...               added to what something else made (adapters)
    stacks   (stack([y_0, y_1, ...], dim) * w).sum()    all weights at once, [T,E]

Here y_e = f(x, W_e) are E copies of one subgraph. They are unified as in routed loops (`unify`), and all but the first
copy are dropped: what is left is expert 0 on a token's row. That the weights are zero where a token chose others is
proved apart (`dense_weights`), and so that no copy adds anything when its weight is zero (`Rows.off`).

Refuses: copies that differ; a sum in which a part has no column of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import node_value, same_size
from memfine_fx.passes.layouts import Lead, RowInterpreter, Rows, Rule
from memfine_fx.passes.loops.roll import Rolled, RolledParam
from memfine_fx.passes.loops.unify import Slot, unify
from memfine_fx.passes.loops.values import Entry, Loop
from memfine_fx.passes.normalize import NormalizedRegion

__all__ = ["DENSE_LOOP_RULES", "DenseLoop", "read_dense_loop"]

aten = torch.ops.aten
_BLANKS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})


@torch.library.custom_op("memfine::every_expert", mutates_args=())
def every_expert(rows: torch.Tensor, dim: int, num_experts: int) -> torch.Tensor:
    """Stands for the stack of all experts' results, given that of one; only ever interpreted.

    Args:
        rows: [T,...] of expert 0.
        dim: where the experts' dimension goes.
        num_experts: E.
    """
    return torch.stack([rows] * num_experts, dim)


@every_expert.register_fake
def _(rows: torch.Tensor, dim: int, num_experts: int) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:dim], num_experts, *rows.shape[dim:]))


@dataclass(frozen=True)
class DenseLoop:
    """A dense loop with one copy of its expert.

    Args:
        rolled: the copy, and what its parameters stand for.
        columns: outer nodes of each expert's own weight column, in expert order; empty where the weights are [T,E].
        base: outer node that the experts' results are added to, or None.
    """

    rolled: Rolled
    columns: tuple[fx.Node, ...]
    base: fx.Node | None = None


def read_dense_loop(region: NormalizedRegion, columns: Mapping[fx.Node, int]) -> DenseLoop | None:
    """The dense loop of a region, or None where it holds none.

    Args:
        region: a cut as functional ATen; not changed.
        columns: inputs that are the weight column of one expert, with that expert.

    Raises:
        CannotChunk: see the module docstring.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(region.graph_module.graph, env)
    assert isinstance(output, fx.Node), "a region returns one tensor"
    placeholders = [env[node] for node in region.graph_module.graph.nodes if node.op == "placeholder"]
    for old, new in env.items():
        new.meta = dict(old.meta)
    reader = _Reader(graph, dict(zip(placeholders, region.inputs, strict=True)), columns)
    stacks = [node for node in graph.nodes if reader.copies_in_stack(node)]
    if stacks:
        return reader.roll_stacks(output, stacks)
    parts = [] if not columns else _parts(output)
    return reader.roll_sum(parts, output) if len(parts) > 1 else None


def _parts(node: fx.Node) -> list[fx.Node]:
    """The terms of a sum of tensors; zeros add nothing."""
    if node.target is aten.add.Tensor and not node.kwargs:
        terms = [_parts(term) for term in node.args if isinstance(term, fx.Node)]
        numbers = [term for term in node.args if not isinstance(term, fx.Node)]
        return list(itertools.chain(*terms)) if not any(numbers) else [node]
    return [] if node.target in _BLANKS else [node]


class _Reader:
    def __init__(self, graph: fx.Graph, outer: dict[fx.Node, fx.Node], columns: Mapping[fx.Node, int]) -> None:
        self._graph = graph
        self._outer = outer
        self._columns = {node: columns[source] for node, source in outer.items() if source in columns}

    def copies_in_stack(self, node: fx.Node) -> list[fx.Node]:
        """What a stack (or a concatenation of unsqueezed tensors) puts side by side, if two or more."""
        if node.target is aten.stack.default:
            copies: Any = node.args[0]
        elif node.target is aten.cat.default and all(part.target is aten.unsqueeze.default for part in node.args[0]):  # type: ignore[union-attr]
            copies = [part.args[0] for part in node.args[0]]  # type: ignore[union-attr]  # nodes
        else:
            return []
        has_matmuls = all(self._params(copy) for copy in copies)
        return list(copies) if len(copies) > 1 and has_matmuls else []

    def roll_stacks(self, output: fx.Node, stacks: list[fx.Node]) -> DenseLoop:
        slots: dict[fx.Node, Slot] = {}
        num_experts = len(self.copies_in_stack(stacks[0]))
        for stack in stacks:
            copies = self.copies_in_stack(stack)
            if len(copies) != num_experts:
                raise CannotChunk(f"stacks of {num_experts} and of {len(copies)} experts in one region", stack)
            slots.update(self._unify(copies))
            dim = stack.args[1] if len(stack.args) > 1 else stack.kwargs.get("dim", 0)
            value = node_value(stack)
            assert isinstance(value, torch.Tensor) and isinstance(dim, int)
            with self._graph.inserting_before(stack):
                marked = self._graph.call_function(
                    torch.ops.memfine.every_expert.default, (copies[0], dim % value.ndim, num_experts)
                )
            marked.meta["val"] = value
            stack.replace_all_uses_with(marked)
        return DenseLoop(self._rolled(output, slots, num_experts), ())

    def roll_sum(self, parts: list[fx.Node], output: fx.Node) -> DenseLoop:
        by_expert: dict[int, fx.Node] = {}
        base = next((part for part in parts if self._is_base(part, output)), None)
        for part in parts:
            if part is base:
                continue
            experts = {self._columns[node] for node in self._ancestors(part) if node in self._columns}
            if len(experts) != 1 or experts & by_expert.keys():
                raise CannotChunk("a term of the sum over experts has no weight column of its own", part)
            by_expert[experts.pop()] = part
        if sorted(by_expert) != list(range(len(by_expert))):
            raise CannotChunk(f"experts {sorted(by_expert)} are summed; expected all from 0 on", parts[0])
        results = [by_expert[expert] for expert in range(len(by_expert))]
        slots = self._unify(results)
        order = sorted(self._columns, key=self._columns.__getitem__)
        if [self._columns[node] for node in order] != list(range(len(results))):
            raise CannotChunk("an expert has several weight columns", parts[0])
        rolled = self._rolled(results[0], slots, len(results))
        columns = tuple(self._outer[node] for node in order)
        return DenseLoop(rolled, columns, None if base is None else self._outer[base])

    def _is_base(self, part: fx.Node, output: fx.Node) -> bool:
        """Whether a term comes from outside as it is, of the output's shape and dtype."""
        value, whole = node_value(part), node_value(output)
        is_input = part in self._outer and part not in self._columns
        if not is_input or not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
            return False
        has_same_shape = value.ndim == whole.ndim and all(map(same_size, value.shape, whole.shape))
        return has_same_shape and value.dtype is whole.dtype

    def _unify(self, results: list[fx.Node]) -> dict[fx.Node, Slot]:
        """The slots of the copies; each reads the tokens through an entry of its own."""
        own = [self._ancestors(result) | {result} for result in results]
        shared = set().union(*(a & b for a, b in itertools.combinations(own, 2)))
        loop = Loop(next(iter(self._outer)), 1, is_distinct=True)
        position = {node: place for place, node in enumerate(self._graph.nodes)}
        first = {node for node in own[0] if self._columns.get(node) == 0}
        for expert, nodes in enumerate(own):
            for node in nodes & set(self._columns):
                loop.values[node] = Entry(expert, "t", next(iter(first)))
            for node in sorted(nodes - shared, key=position.__getitem__):
                for source in node.all_input_nodes:
                    if source in shared and not self._is_param(source):
                        self._give_entry(loop, expert, node, source)
        copies = [(expert, None) for expert in range(len(results))]
        slots = unify(loop, copies, results, lambda a, b: self._outer[a] is self._outer[b])
        return {slot.node: slot for slot in slots}

    def _give_entry(self, loop: Loop, expert: int, node: fx.Node, source: fx.Node) -> None:
        if not isinstance(node_value(source), torch.Tensor):
            return
        with self._graph.inserting_before(node):
            entry = self._graph.call_function(aten.alias.default, (source,))
        entry.meta["val"] = node_value(source)
        loop.values[entry] = Entry(expert, "t", source)
        node.replace_input_with(source, entry)

    def _rolled(self, output: fx.Node, slots: dict[fx.Node, Slot], num_experts: int) -> Rolled:
        """The graph with expert 0's copy alone, its parameters inputs."""
        outer = dict(self._outer)
        for slot in slots.values():
            if slot.tensors[0] not in outer:
                raise CannotChunk("a table of experts is computed inside the region", slot.node)
            if slot.node.op != "placeholder":
                with self._graph.inserting_before(next(iter(self._graph.nodes))):
                    stand_in = self._graph.placeholder(f"expert_{slot.node.name}")
                stand_in.meta["val"] = node_value(slot.node)
                slot.node.replace_all_uses_with(stand_in)
                outer[stand_in] = self._outer[slot.tensors[0]]
        for node in list(self._graph.nodes):
            if node.op == "output":
                self._graph.erase_node(node)
        self._graph.output(output)
        self._graph.eliminate_dead_code()
        for node in [node for node in self._graph.nodes if node.op == "placeholder" and not node.users]:
            self._graph.erase_node(node)
        params = {
            self._outer[slot.tensors[0]]: RolledParam(slot.kind, tuple(self._outer[tensor] for tensor in slot.tensors))
            for slot in slots.values()
        }
        if len(params) < len(slots):
            raise CannotChunk("one table of experts is read in two ways", output)
        inputs = tuple(outer[node] for node in self._graph.nodes if node.op == "placeholder")
        module = fx.GraphModule(torch.nn.Module(), self._graph)
        return Rolled(NormalizedRegion(module, inputs), params, num_experts)

    def _is_param(self, node: fx.Node) -> bool:
        """A parameter, an entry of one, or a transpose of either."""
        while node.op != "placeholder" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return node in self._outer and isinstance(node_value(self._outer[node]), torch.nn.Parameter)

    def _params(self, node: fx.Node) -> set[fx.Node]:
        return {source for source in self._ancestors(node) if source.op == "placeholder" and self._is_param(source)}

    def _ancestors(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        pending = list(node.all_input_nodes)
        while pending:
            source = pending.pop()
            if source not in found:
                found.add(source)
                pending.extend(source.all_input_nodes)
        return found


def _every_expert(interpreter: RowInterpreter, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, dim, num_experts = interpreter.as_rows(args[0], node), args[1], args[2]
    groups = rows.lead.groups
    has_tokens = Lead("".join(groups)) is Lead.TOKEN and dim <= len(groups)
    if not has_tokens or not same_size(num_experts, interpreter.num_experts or num_experts):
        raise CannotChunk(f"experts' results of {rows.lead.value} stacked along dimension {dim}", node)
    interpreter.check_num_experts(num_experts, node)
    return Rows(Lead(*groups[:dim], "e", *groups[dim:]), rows.expr, rows.per_row)


DENSE_LOOP_RULES: dict[Any, Rule] = {torch.ops.memfine.every_expert.default: _every_expert}
