"""Data flow of a traced graph, with the edges that FX does not draw.

An in-place operation changes its target for every later reader, but FX only links it to the readers of its
own result. `Dataflow` adds those edges (through views too), so that slices and dominators are true.
"""

from __future__ import annotations

import inspect
import operator
import os
import re
from collections.abc import Iterable
from functools import cached_property

import networkx as nx
import torch
from torch import fx
from torch.utils import _pytree as pytree

from memfine_fx.records import Where

__all__ = [
    "Dataflow",
    "is_float_tensor",
    "is_int_tensor",
    "node_value",
    "provenance",
    "same_size",
    "static_size",
    "target_name",
]

_VIEW_NAMES = frozenset(
    "view reshape getitem transpose permute unsqueeze squeeze expand detach chunk split narrow select "
    "flatten unflatten t mT T contiguous swapaxes movedim view_as expand_as unbind".split()
)
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split()
)


def node_value(node: fx.Node) -> object:
    """The fake tensor (or symbol, or tuple) that tracing recorded for `node`; None when it recorded none."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_int_tensor(node: fx.Node) -> bool:
    value = node_value(node)
    return (
        isinstance(value, torch.Tensor)
        and not value.dtype.is_floating_point
        and not value.dtype.is_complex
        and value.dtype is not torch.bool
    )


def is_float_tensor(node: fx.Node) -> bool:
    value = node_value(node)
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def same_size(left: int | torch.SymInt, right: int | torch.SymInt) -> bool:
    """Whether two sizes are equal as expressions; never adds a guard."""
    if isinstance(left, torch.SymInt) or isinstance(right, torch.SymInt):
        return bool((_expr(left) - _expr(right)).expand() == 0)
    return left == right


def static_size(size: int | torch.SymInt) -> int | None:
    """The number behind a size, also where a guard has since pinned its symbol; None while it is symbolic."""
    expr = _expr(size)
    return int(expr) if expr.is_number else None


def _expr(size: int | torch.SymInt):  # type: ignore[no-untyped-def]  # sympy ships no types
    import sympy

    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def target_name(node: fx.Node) -> str:
    """Short name of what a call node calls: "topk", "grouped_mm_fallback", "getitem"."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return getattr(node.target, "__name__", str(node.target))


def provenance(node: fx.Node) -> Where:
    """Module path and source line of a node, as far as the trace kept them."""
    stack = node.meta.get("nn_module_stack") or {}
    module = ""
    for entry in stack.values():
        module = entry[0] if isinstance(entry, tuple) else str(entry)
    trace = node.meta.get("stack_trace") or node.stack_trace or ""
    places = [_file_and_line(line) for line in trace.splitlines() if "File " in line]
    written = [place for place in places if not place.startswith(_TORCH_FOLDER)] or places
    return Where(module=_clean_module_path(module), source=written[-1] if written else "")


def _clean_module_path(path: str) -> str:
    path = re.sub(r"^L\['\w+'\]", "", path)
    for old, new in (("_modules['", ""), ("']", ""), ("._modules.", "."), ("_modules.", "")):
        path = path.replace(old, new)
    return path.replace("[", ".").replace("]", "").replace("'", "").replace("..", ".").strip(".")


def _file_and_line(line: str) -> str:
    file, _, rest = line.partition('"')[2].partition('"')
    number = rest.partition("line ")[2].partition(",")[0].strip()
    return f"{file}:{number}"


class Dataflow:
    """A graph's def-use edges and mutation edges as a networkx DiGraph.

    Args:
        graph: the graph, read only.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.mutations: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.digraph: nx.DiGraph[fx.Node] = nx.DiGraph()
        self._roots: dict[fx.Node, fx.Node] = {}
        self._build()

    def root(self, node: fx.Node) -> fx.Node:
        """The node whose storage `node` may share, following views and in-place results."""
        return self._roots[node]

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        """Every node that may share `node`'s storage, itself included."""
        root = self._roots[node]
        return [other for other, other_root in self._roots.items() if other_root is root]

    def descendants(self, sources: Iterable[fx.Node]) -> set[fx.Node]:
        return set().union(*(nx.descendants(self.digraph, source) for source in sources))

    def ancestors(self, sinks: Iterable[fx.Node]) -> set[fx.Node]:
        return set().union(*(nx.ancestors(self.digraph, sink) for sink in sinks))

    def post_dominators(self, node: fx.Node) -> list[fx.Node]:
        """Every node that all paths from `node` to the graph's output pass, nearest first."""
        chain = []
        while node in self._immediate_post_dominators:
            above = self._immediate_post_dominators[node]
            if above is None or above is node:
                break
            chain.append(above)
            node = above
        return chain

    @cached_property
    def _immediate_post_dominators(self) -> dict[fx.Node, fx.Node | None]:
        output = next(iter(reversed(self.graph.nodes)))
        return dict(nx.immediate_dominators(self.digraph.reverse(copy=False), output))

    def _build(self) -> None:
        members: dict[fx.Node, list[fx.Node]] = {}
        by_storage: dict[int, fx.Node] = {}
        for node in self.graph.nodes:
            self.digraph.add_node(node)
            self.digraph.add_edges_from((source, node) for source in node.all_input_nodes)
            root = self._find_root(node)
            value = node_value(node)
            if isinstance(value, torch.Tensor):
                root = by_storage.setdefault(value.untyped_storage()._cdata, root)
            self._roots[node] = root
            members.setdefault(root, []).append(node)
            mutated = _mutated_arguments(node)
            if mutated:
                self.mutations[node] = mutated
        for node, mutated in self.mutations.items():
            for target in mutated:
                self._add_mutation_edges(node, members[self._roots[target]])

    def _add_mutation_edges(self, mutation: fx.Node, aliases: list[fx.Node]) -> None:
        after = self.position[mutation]
        for alias in aliases:
            for user in alias.users:
                if self.position[user] > after:
                    self.digraph.add_edge(mutation, user)

    def _find_root(self, node: fx.Node) -> fx.Node:
        is_alias = target_name(node) in _VIEW_NAMES or bool(_mutated_arguments(node))
        first = node.args[0] if node.args else None
        if node.op in ("call_function", "call_method") and is_alias and isinstance(first, fx.Node):
            return self._roots[first]
        return node


def _mutated_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that a call changes in place."""
    if node.op not in ("call_function", "call_method"):
        return ()
    if isinstance(node.target, torch._ops.OpOverload):
        return _schema_mutations(node, node.target)
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return (out,)
    if first is None:
        return ()
    name = target_name(node)
    is_inplace_name = name.endswith("_") and not name.endswith("__")
    if node.target is operator.setitem or node.target in _INPLACE_OPERATORS or is_inplace_name:
        return (first,)
    return (first,) if _asks_inplace(node) else ()


def _asks_inplace(node: fx.Node) -> bool:
    """Whether `inplace=True` is among the arguments, by keyword or by position."""
    if node.kwargs.get("inplace") is True:
        return True
    if node.op != "call_function" or not any(argument is True for argument in node.args):
        return False
    try:
        parameters = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]  # a function
    except (TypeError, ValueError):
        return False
    return any(name == "inplace" and value is True for name, value in zip(parameters, node.args, strict=False))


def _schema_mutations(node: fx.Node, target: torch._ops.OpOverload) -> tuple[fx.Node, ...]:
    mutated: list[fx.Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        mutated.extend(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node))
    return tuple(mutated)
