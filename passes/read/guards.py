"""Guards: bodies that a model skips for experts without rows, proved to do nothing when they are run for them.

Rewritten loops run every expert and leave marks in the graph (`marker`): where a body begins, under which condition the
model skips it, and where it ends. Each body is taken by itself. The condition is assumed to skip it; what follows of
sizes and masks is known then (`no_rows`). From a condition that is no question of emptiness, such as `ids.any()` or
`weights.sum() > 0`, nothing follows that empties the body's rows. The body is run on what is known, node by node:

* a tensor without elements is *empty*, and sums of it are *zero*;
* what adds or writes nothing of an empty or zero operand gives *the same* as its other operand;
* a write into a tensor that the body has not made must write nothing;
* a name's new value must be the same as its old one. Where it is not, the old one is chosen when the graph runs, if
  what the body computes for it is defined without rows and passes no gradient on that is not a number;
* nothing else that the body makes may be read outside of it, and no random number may be drawn.

Before:  enter_number(u0, "==", 0, True, where);  ...;  y = if_run(x, z, where);  leave_body(where)
After:   no mark; readers of y read z where it is the same as x, else torch.where(has_rows, z, x)

Fails: `GuardRefused` with the condition's place. The attempt to capture that loop is given up, and the model's own code
runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfine_fx.errors import GuardRefused
from memfine_fx.passes.dataflow import (
    Dataflow,
    is_int_tensor,
    node_value,
    provenance,
    same_size,
)
from memfine_fx.passes.ops import (
    ASSERTIONS,
    CASTS,
    name_of,
)
from memfine_fx.passes.read.guard_proof import TAKES_ENTRIES, GuardedBody, GuardProof, is_total, value_of
from memfine_fx.passes.read.marker import (
    ALL_IDS,
    COUNT_ROWS,
    COVERED,
    ENTER_NUMBER,
    ENTER_TENSOR,
    LEAVE_BODY,
    MARKS,
)
from memfine_fx.passes.read.no_rows import GraphIndex, is_pure
from memfine_fx.passes.read.seeds import proved_of

__all__ = ["GUARDED", "OpenCut", "discharge_guards", "is_total", "refuse_guards"]

GUARDED = "memfine_guarded"
"""Key of a node's meta: the condition that its body is skipped under, "file:line", and the path of its module."""


@dataclass(frozen=True)
class OpenCut:
    """Cuts of rows by counts of which it is not proved that they are as many, or counts of ids that may be too large.

    Reading a region proves it of what is in it; any other would raise where the model's own code does not.
    """

    nodes: tuple[fx.Node, ...]
    refusal: GuardRefused


def discharge_guards(graph_module: fx.GraphModule) -> list[OpenCut]:
    """Prove the marks of one graph and take them out.

    Returns:
        What only the reading of regions can prove.

    Raises:
        GuardRefused: one cannot be proved; the graph is not to be used.
    """
    graph = graph_module.graph
    marks = [node for node in graph.nodes if node.target in MARKS]
    if not marks and not any(node.target is COUNT_ROWS for node in graph.nodes):
        return []
    index = GraphIndex(graph)
    uncertain = [node for node in graph.nodes if node.target is COUNT_ROWS and not _counts_every_id(node, index.flow)]
    for body in _bodies(graph):
        GuardProof(body, index).check()
    for mark in marks:
        if mark.target is ALL_IDS:
            _check_ids(mark, index)
    cuts = [_cut_by(mark) for mark in marks if mark.target is COVERED and not _is_covered(mark)]
    operands = {source for mark in marks for source in mark.all_input_nodes if source.target not in MARKS}
    for mark in reversed(marks):
        graph.erase_node(mark)
    _erase_unread(graph, operands)
    graph.lint()
    graph_module.recompile()
    left = set(graph.nodes)
    return [*cuts, *(_open_count(node) for node in uncertain if node in left)]


def refuse_guards(graph_module: fx.GraphModule) -> list[OpenCut]:
    """Return nothing where a graph has no marks.

    Raises:
        GuardRefused: it has; the graph is not to be used, since nothing proves them.
    """
    for node in graph_module.graph.nodes:
        if node.target in MARKS or node.target is COUNT_ROWS:
            where = provenance(node)
            raise GuardRefused("the pass that proves it is disabled", where.source, where.module)
    return []


def _bodies(graph: fx.Graph) -> list[GuardedBody]:
    """Every body, inner ones before those around them."""
    result: list[GuardedBody] = []
    inner: GuardedBody | None = None
    for node in graph.nodes:
        if node.target in (ENTER_TENSOR, ENTER_NUMBER):
            inner = GuardedBody(node, inner)
        elif inner is not None and node.target is LEAVE_BODY:
            result.append(inner)
            if inner.around is not None:
                inner.around.nodes += inner.nodes
            inner = inner.around
        elif inner is not None:
            inner.nodes.append(node)
            node.meta[GUARDED] = inner.where, provenance(inner.enter).module
    if inner is not None:
        raise inner.unproved("a jump leads to other code")
    return result


# Other marks.


def _check_ids(mark: fx.Node, index: GraphIndex) -> None:
    ids, num_experts, where = mark.args
    assert isinstance(ids, fx.Node)
    _, bound = proved_of(ids, index.flow)
    if bound is None or not isinstance(num_experts, int) or bound > num_experts:
        raise GuardRefused("ids may name other experts than a list holds", str(where), provenance(mark).module)


def _counts_every_id(node: fx.Node, flow: Dataflow) -> bool:
    """Whether the ids that are counted are surely below the number of counts."""
    ids, num_experts = node.args
    bound = _bound_of(ids, flow)
    return bound is not None and isinstance(num_experts, int) and bound <= num_experts


def _bound_of(node: Any, flow: Dataflow) -> int | None:
    """A number that integers are surely below, of a choice, of remainders and of what takes entries of these."""
    if not isinstance(node, fx.Node) or flow.is_written(node):
        return None
    bound = proved_of(node, flow)[1]
    if bound is not None or not node.args:
        return bound
    name, first = name_of(node), node.args[0]
    if name == "remainder" and type(node.args[1]) is int and node.args[1] > 0:
        return node.args[1]
    if name in ("sort", "getitem") and isinstance(first, fx.Node) and name_of(first) == "sort":
        return _bound_of(first.args[0], flow) if node.args[1] == 0 else None
    least = node.kwargs.get("min", node.args[1] if len(node.args) > 1 else None)
    is_idle = name in ("clamp", "clamp_min") and (least is None or (type(least) is int and least <= 0))
    return _bound_of(first, flow) if (name in TAKES_ENTRIES or is_idle) and is_int_tensor(node) else None


def _open_count(node: fx.Node) -> OpenCut:
    where = provenance(node)
    return OpenCut((node,), GuardRefused("ids are counted that may be too large", where.source, where.module))


def _cut_by(mark: fx.Node) -> OpenCut:
    rows, counts, where = mark.args
    assert isinstance(rows, fx.Node)
    nodes = tuple(node for node in rows.users if node.target not in MARKS and counts in node.args)
    refusal = GuardRefused("rows are cut by counts that may not be as many", str(where), provenance(mark).module)
    return OpenCut(nodes, refusal)


def _is_covered(mark: fx.Node) -> bool:
    """Whether counts are as many as rows: they are the counts of ids, one a row."""
    rows, counts, _ = mark.args
    assert isinstance(rows, fx.Node) and isinstance(counts, (list, tuple))
    entries = [_counted_entry(count) for count in counts]
    sources = {None if entry is None else entry[0] for entry in entries}
    source = next(iter(sources)) if len(sources) == 1 else None
    if source is None or [entry[1] for entry in entries if entry] != list(range(len(counts))):
        return False
    counted, ids, value = node_value(source), value_of(source.args[0]), node_value(rows)
    assert isinstance(counted, torch.Tensor) and isinstance(value, torch.Tensor)
    if not isinstance(ids, torch.Tensor):
        return False
    return same_size(value.shape[0], ids.numel()) and same_size(counted.shape[0], len(counts))


def _counted_entry(count: object) -> tuple[fx.Node, int] | None:
    """(counts, e) of counts[e].item()"""
    if not isinstance(count, fx.Node) or name_of(count) != "item":
        return None
    entry = count.args[0]
    if not isinstance(entry, fx.Node) or name_of(entry) != "getitem" or type(entry.args[1]) is not int:
        return None
    source = entry.args[0]
    while isinstance(source, fx.Node) and name_of(source) in CASTS | {"cpu", "detach", "contiguous"}:
        source = source.args[0]
    is_counted = isinstance(source, fx.Node) and (source.target is COUNT_ROWS or name_of(source) == "bincount")
    return (source, entry.args[1]) if is_counted else None  # type: ignore[return-value]  # a node


def _erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase what only marks have read. A number that is read from a device, for example, makes the CPU wait.

    Args:
        graph: without its marks.
        nodes: the operands that the marks had.
    """
    pending = set(nodes)
    while pending:
        node = pending.pop()
        # Dynamo asserts that a number of rows is not negative.
        signs = list(node.users) if name_of(node) == "item" else []
        asserted = [user for sign in signs for user in sign.users]
        is_unread = all(sign.target is operator.ge and sign.args == (node, 0) for sign in signs)
        if is_unread and all(name_of(user) in ASSERTIONS for user in asserted):
            for reader in (*asserted, *signs):
                graph.erase_node(reader)
        if not node.users and (name_of(node) == "item" or node.target is COUNT_ROWS or is_pure(node)):
            pending |= set(node.all_input_nodes)
            graph.erase_node(node)
