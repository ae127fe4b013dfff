"""Data flow of a traced graph, with the edges that FX does not draw.

An in-place operation changes its target for every later reader, but FX only links it to the readers of its
own result. `Dataflow` adds those edges (through views too), so that slices are true.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import fx

from memfine_fx import errors
from memfine_fx.compat.operators import OpOverload, schema_arguments
from memfine_fx.compat.tensors import storage_id, tree_leaves
from memfine_fx.errors import CannotChunk
from memfine_fx.memory.sizes import size_expr
from memfine_fx.passes.ops import RESHAPES, TRANSPOSES, VIEWS, name_of, target_name
from memfine_fx.records import Refusal, Where

__all__ = [
    "BREAK",
    "Dataflow",
    "clean_module_path",
    "computed_from",
    "has_unbacked_rows",
    "has_unbacked_shape",
    "in_code",
    "is_float_tensor",
    "is_int_tensor",
    "is_only_asserted",
    "is_same_view",
    "node_value",
    "provenance",
    "refusal_of",
    "same_size",
    "static_size",
    "tensor_of",
    "written_node",
]

_OTHER_CODE = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(os.path.dirname(errors.__file__), "capture", ""),
)
"""Folders of code that is traced and is no model's: torch, and the helpers of rewritten loops."""
_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split()
)

_KEYWORD_OPERATORS = frozenset({operator.and_, operator.or_, operator.not_})  # named so because of Python's keywords


BREAK = "memfine_break"
"""Key of the meta of a graph's output: the stack of the line that Dynamo leaves out behind the graph, or ""; only there
where it breaks the graph."""


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that is known to hold one."""
    value = node_value(node)
    assert isinstance(value, torch.Tensor), f"{node} holds no tensor"
    return value


def node_value(node: fx.Node) -> object:
    """The fake tensor (or symbol, or tuple) that tracing recorded for `node`; None when it recorded none.

    An item assignment has no result of its own; it stands for the tensor that it writes.
    """
    value = node.meta.get("example_value", node.meta.get("val"))
    if value is None and node.target is operator.setitem and isinstance(node.args[0], fx.Node):
        return node_value(node.args[0])
    return value


def written_node(node: fx.Node) -> fx.Node:
    """The node that holds what `node` computes: itself, or the target of an item assignment."""
    is_assignment = node.target is operator.setitem and isinstance(node.args[0], fx.Node)
    return written_node(node.args[0]) if is_assignment else node  # type: ignore[arg-type]  # a node


def has_unbacked_shape(node: fx.Node) -> bool:
    """Whether a tensor's shape, or a number, is known only once the data is."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    value = node_value(node)
    is_number = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return (is_number or isinstance(value, torch.Tensor)) and bool(free_unbacked_symbols(value))


def has_unbacked_rows(node: fx.Node) -> bool:
    """Whether the number of rows is known only once the routing is (the result of a nonzero, say)."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    value = node_value(node)
    return isinstance(value, torch.Tensor) and value.ndim > 0 and bool(free_unbacked_symbols(value.shape[0]))


def is_only_asserted(node: fx.Node) -> bool:
    """Whether a size, a comparison of sizes or a tensor taken for its size is read by assertions alone, if at all.

    A slice that nothing reads is one too: Dynamo leaves dead code in the bodies of checkpoints.
    """
    if target_name(node) in ("_assert_scalar", "_check", "_check_is_size"):
        return True
    if node.op not in ("call_function", "call_method") or target_name(node) not in _SIZE_OPS:
        return False
    value = node_value(node)
    is_number = isinstance(value, torch.Size) or not isinstance(value, (torch.Tensor, tuple, list))
    return (is_number or bool(node.users) or target_name(node) == "getitem") and all(map(is_only_asserted, node.users))


_SIZE_OPS = frozenset("sym_size sym_sum size getitem le ge lt gt eq ne __le__ __ge__ add mul sub mod floordiv".split())


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
    if not (isinstance(left, int) and isinstance(right, int)):
        return bool((size_expr(left) - size_expr(right)).expand() == 0)
    return left == right


def static_size(size: int | torch.SymInt) -> int | None:
    """The number behind a size, also where a guard has since pinned its symbol; None while it is symbolic."""
    expr = size_expr(size)
    return int(expr) if expr.is_number else None


def is_same_view(left: fx.Node, right: fx.Node) -> bool:
    """Whether two outer nodes are the same view of the same tensor."""
    if left is right:
        return True
    is_part = name_of(left) in ("select", "slice", "narrow") or (name_of(left) == "getitem" and _is_basic(left.args[1]))
    if name_of(left) not in RESHAPES | TRANSPOSES | {"getattr"} and not is_part:
        return False
    if (left.op, left.target, left.kwargs) != (right.op, right.target, right.kwargs):
        return False
    return len(left.args) == len(right.args) and all(
        is_same_view(a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) else a == b
        for a, b in zip(left.args, right.args, strict=True)
    )


def computed_from(nodes: Iterable[fx.Node], is_stop: Callable[[fx.Node], bool] = lambda node: False) -> set[fx.Node]:
    """Return nodes and all that they are computed from, back to those that are stops, which are left out."""
    reached: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached and not is_stop(node):
            reached.add(node)
            pending.extend(node.all_input_nodes)
    return reached


def refusal_of(where: Where, refusal: CannotChunk) -> Refusal:
    """Return the refusal of a region, with the place in the model's code where its proof stopped."""
    obstacle = provenance(refusal.at).source if isinstance(refusal.at, fx.Node) else ""
    return Refusal(where, refusal.reason, refusal.details, refusal.node, "" if obstacle == where.source else obstacle)


def _is_basic(index: object) -> bool:
    """Whether an index holds numbers and slices of numbers only, so that what it picks is a view."""
    items = index if isinstance(index, tuple) else (index,)
    bounds = [bound for item in items if isinstance(item, slice) for bound in (item.start, item.stop, item.step)]
    numbers = [
        item for item in (*items, *bounds) if item is not None and item is not ... and not isinstance(item, slice)
    ]
    return all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)


def in_code(user: fx.Node, node: fx.Node) -> fx.Node:
    """Return the user of a node, or the node where the user is the graph's end and stands at no line of the code."""
    return node if user.op == "output" and not user.meta.get(BREAK) else user


def provenance(node: fx.Node) -> Where:
    """Module path and source line of a node, as far as the trace has them."""
    stack = node.meta.get("nn_module_stack") or {}
    module = ""
    for entry in stack.values():
        module = entry[0] if isinstance(entry, tuple) else str(entry)
    trace = node.meta.get("stack_trace") or node.stack_trace or node.meta.get(BREAK, "")
    places = [_file_and_line(line) for line in trace.splitlines() if "File " in line]
    written = [place for place in places if not place.startswith(_OTHER_CODE)] or places
    return Where(module=clean_module_path(module), source=written[-1] if written else "")


def clean_module_path(path: str) -> str:
    """Return the path of a module from the source that Dynamo has for it, such as L['self'].layers[0]."""
    path = re.sub(r"^L\['\w+'\]", "", path)
    path = re.sub(r"\.\w+\.__self__", "", path)  # a method that stands on its module while a call runs
    for old, new in (("_modules['", ""), ("']", ""), ("._modules.", "."), ("_modules.", "")):
        path = path.replace(old, new)
    return path.replace("[", ".").replace("]", "").replace("'", "").replace("..", ".").strip(".")


def _file_and_line(line: str) -> str:
    file, _, rest = line.partition('"')[2].partition('"')
    number = rest.partition("line ")[2].partition(",")[0].strip()
    return f"{file}:{number}"


def _reached(starts: Iterable[fx.Node], edges: Mapping[fx.Node, Iterable[fx.Node]]) -> set[fx.Node]:
    """Return the nodes that a path of at least one edge from one of `starts` leads to."""
    reached: set[fx.Node] = set()
    pending = list(starts)
    while pending:
        new = [node for node in edges[pending.pop()] if node not in reached]
        reached.update(new)
        pending.extend(new)
    return reached


class Dataflow:
    """A graph's def-use edges and mutation edges.

    Args:
        graph: the graph, read only.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.mutations: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._sources: dict[fx.Node, dict[fx.Node, None]] = {node: {} for node in graph.nodes}
        self._readers: dict[fx.Node, dict[fx.Node, None]] = {node: {} for node in graph.nodes}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._build()

    def place_inserted(self, place: fx.Node) -> None:
        """Give nodes that were since inserted before `place` its position: as readers they count, not as views."""
        node = place.prev
        while node.op != "root" and node not in self.position:
            self.position[node] = self.position[place]
            self._roots[node] = node
            node = node.prev

    def root(self, node: fx.Node) -> fx.Node:
        """The node whose storage `node` may share, following views and in-place results."""
        return self._roots[node]

    def is_written(self, node: fx.Node) -> bool:
        """Return whether any call of the graph may write into the storage of a node's tensor.

        Unlike its root, the storage tells the results of one call from each other.
        """
        storage = storage_id(node_value(node))
        if storage is None:
            return self._roots[node] in self._written_roots
        return not self._written_storages.isdisjoint((storage, None))

    @functools.cached_property
    def _written_roots(self) -> set[fx.Node]:
        return {self._roots[target] for written in self.mutations.values() for target in written}

    @functools.cached_property
    def _written_storages(self) -> set[int | None]:
        return {storage_id(node_value(target)) for written in self.mutations.values() for target in written}

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        """Every node that may share `node`'s storage, itself included."""
        root = self._roots[node]
        return [other for other, other_root in self._roots.items() if other_root is root]

    def sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """Return the nodes whose results or writes a node reads, in the order in which the edges were found."""
        return self._sources[node]

    def descendants(self, sources: Iterable[fx.Node]) -> set[fx.Node]:
        return _reached(sources, self._readers)

    def ancestors(self, sinks: Iterable[fx.Node]) -> set[fx.Node]:
        return _reached(sinks, self._sources)

    def _build(self) -> None:
        members: dict[fx.Node, list[fx.Node]] = {}
        by_storage: dict[int, fx.Node] = {}
        for node in self.graph.nodes:
            for source in node.all_input_nodes:
                self._add_edge(source, node)
            root = self._find_root(node)
            storage = storage_id(node_value(node))
            if storage is not None:
                root = by_storage.setdefault(storage, root)
            self._roots[node] = root
            members.setdefault(root, []).append(node)
            mutated = _mutated_arguments(node)
            if mutated:
                self.mutations[node] = mutated
        writes: dict[fx.Node, list[int]] = {}
        for node, mutated in self.mutations.items():
            for target in mutated:
                writes.setdefault(self._roots[target], []).append(self.position[node])
        for node, mutated in self.mutations.items():
            for target in mutated:
                root = self._roots[target]
                self._add_mutation_edges(node, members[root], writes[root])

    def _add_mutation_edges(self, mutation: fx.Node, aliases: list[fx.Node], writes: list[int]) -> None:
        """Edges to readers up to the next write, which reads the tensor itself and leads to those after it."""
        after = self.position[mutation]
        until = min((position for position in writes if position > after), default=len(self.position))
        for alias in aliases:
            for user in alias.users:
                if after < self.position[user] <= until:
                    self._add_edge(mutation, user)

    def _add_edge(self, source: fx.Node, reader: fx.Node) -> None:
        self._sources[reader][source] = None
        self._readers[source][reader] = None

    def _find_root(self, node: fx.Node) -> fx.Node:
        is_view = name_of(node) in VIEWS and not _gathers(node)
        is_alias = is_view or bool(_mutated_arguments(node))
        first = node.args[0] if node.args else None
        if node.op in ("call_function", "call_method") and is_alias and isinstance(first, fx.Node):
            return self._roots[first]
        return node


def _gathers(node: fx.Node) -> bool:
    """Whether an item is a copy: it is where a tensor says which entries; a tensor without dimensions is a number."""
    if target_name(node) != "getitem" or len(node.args) < 2:
        return False
    indices = node.args[1] if isinstance(node.args[1], (tuple, list)) else (node.args[1],)
    values = [node_value(index) for index in indices if isinstance(index, fx.Node)]
    return any(isinstance(value, torch.Tensor) and value.ndim > 0 for value in values)


def _mutated_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments that a call changes in place."""
    if node.op not in ("call_function", "call_method"):
        return ()
    if isinstance(node.target, OpOverload):
        return _schema_mutations(node, node.target)
    firsts = _nodes_in(node.args[0] if node.args else node.kwargs.get("input"))
    outs = _nodes_in(node.kwargs.get("out"))
    if outs or not firsts:
        return outs
    name = target_name(node)
    is_inplace_name = name.endswith("_") and not name.endswith("__") and node.target not in _KEYWORD_OPERATORS
    if node.target is operator.setitem or node.target in _INPLACE_OPERATORS or is_inplace_name:
        return firsts
    return firsts if _asks_inplace(node) else ()


def _nodes_in(value: object) -> tuple[fx.Node, ...]:
    """A node, or the nodes of a list: `torch._foreach_add_` writes into several tensors."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(item for item in values if isinstance(item, fx.Node))


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


def _schema_mutations(node: fx.Node, target: OpOverload) -> tuple[fx.Node, ...]:
    mutated: list[fx.Node] = []
    for index, argument in enumerate(schema_arguments(target)):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        mutated.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, fx.Node))
    return tuple(mutated)
