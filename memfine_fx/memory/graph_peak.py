"""Peak of live bytes of an FX graph, symbolically, by storage.

Steps:
1. every tensor-producing node owns a storage; views own none and keep their source alive;
2. a pointwise node that only feeds pointwise nodes or reductions is never a buffer when Inductor compiles the
   graph (it is fused away); without fusion every node is;
3. walk the nodes in order: allocate at the producer, free after the last reader; the peak is the largest sum.

Arguments are the caller's and count nothing. Sizes are sympy expressions in the graph's own symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx

from memfine_fx.compat.operators import OpOverload, is_pointwise, is_view, op_name, qualified_name
from memfine_fx.memory.kernel_scratch import cast_bytes, scratch_bytes
from memfine_fx.memory.liveness import OP_PHASES, Allocation, Call, CountedInputs, GraphMemory, call_of
from memfine_fx.memory.products import MULTIPLYING
from memfine_fx.memory.sizes import size_expr

__all__ = ["live_peaks", "peak_bytes_at", "read_graph", "rows_by_symbol", "tensor_bytes"]


def live_peaks(graph: fx.Graph, *, is_fused: bool) -> list[sympy.Expr]:
    """Live bytes right after each allocation, the maximum of which is the peak.

    Args:
        graph: ATen with `meta["val"]`.
        is_fused: whether Inductor will fuse pointwise chains.
    """
    owners = _owners(graph, is_fused)
    last_reader: dict[fx.Node, fx.Node] = _last_readers(graph, owners)
    freed_after: dict[fx.Node, list[fx.Node]] = {}
    for owner, reader in last_reader.items():
        freed_after.setdefault(reader, []).append(owner)
    live: sympy.Expr = sympy.Integer(0)
    peaks: list[sympy.Expr] = []
    for node in graph.nodes:
        is_owner = owners.get(node) is node
        if is_owner:
            live = live + tensor_bytes(node)
            peaks.append(sympy.expand(live if is_fused else live + cast_bytes(node)))
        live = live - sum(tensor_bytes(dead) for dead in freed_after.get(node, []))
    return peaks


def read_graph(
    graph: fx.Graph, *, is_fused: bool, inputs: CountedInputs | None = None, marks: bool = False
) -> GraphMemory:
    """Return an estimate of the allocations and calls of a forward or backward graph that is not compiled yet.

    Args:
        graph: ATen with `meta["val"]`, chunked regions as calls of their ops.
        is_fused: whether Inductor will fuse pointwise chains.
        inputs: the graph inputs whose bytes count; None for none.
        marks: whether products of matrices are calls too: they tell layers apart in a graph without regions.
    """
    inputs = inputs or CountedInputs()
    counted = {*inputs.freed, *inputs.held}
    owners = _owners(graph, is_fused)
    for node in graph.nodes:
        if node.op == "placeholder" and str(node.target) in counted and _is_tensor(node):
            owners[node] = node
        elif _is_tuple(node):
            owners[node] = _view_source(node, owners) if _is_split(node) else None
        elif _is_element(node):
            owners[node] = _view_source(node, owners) if _is_split(node.args[0]) else node
        elif _is_view(node):
            owners[node] = _view_source(node, owners)
    position = {node: place for place, node in enumerate(graph.nodes)}
    savers, rows = _savers(graph), rows_by_symbol(graph)
    allocations = []
    for owner, reader in _last_readers(graph, owners).items():
        made_by = owner.args[0] if _is_element(owner) else owner
        assert isinstance(made_by, fx.Node)
        start = 0 if owner.op == "placeholder" else position[made_by]
        is_input = owner.op == "placeholder"
        outlives = reader.op == "output" or (is_input and str(owner.target) in inputs.held)
        stop = None if outlives else position[reader] + 1
        num_bytes = tensor_bytes(owner).subs(rows)
        saved_by, result_of = savers.get(owner, ""), _result_of(owner, made_by)
        allocations.append(Allocation(owner.name, num_bytes, start, stop, is_input, saved_by, result_of))
    for node, place in position.items():
        if scratch := scratch_bytes(node) + (0 if is_fused else cast_bytes(node)):
            allocations.append(Allocation(f"scratch of {_name(node.target)}", scratch, place, place + 1))
    calls = (*_calls(graph), *_marks(graph)) if marks else tuple(_calls(graph))
    return GraphMemory(tuple(allocations), calls, len(position))


_PHASES = {f"memfine::{name}": phase for name, phase in OP_PHASES.items() if phase != "route"}


def _calls(graph: fx.Graph) -> Iterator[Call]:
    for place, node in enumerate(graph.nodes):
        phase = _PHASES.get(qualified_name(node.target))
        if phase is not None:
            yield call_of(place, phase, [argument for argument in node.args if isinstance(argument, str)])


def _marks(graph: fx.Graph) -> Iterator[Call]:
    for place, node in enumerate(graph.nodes):
        if _name(node.target) in MULTIPLYING:
            yield Call(place, "", "mark")


def _savers(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return, for each node that a region saves for backward, the region id of that region.

    In a forward graph these are results of `memfine::experts_saving`, in a backward graph arguments of
    `memfine::experts_backward_saved`.
    """
    region_ids: dict[fx.Node, str] = {}
    for node in graph.nodes:
        name = qualified_name(node.target)
        if name == "memfine::experts_saving":
            region_ids |= {user: node.args[5] for user in node.users if _is_element(user) and user.args[1]}
        elif name == "memfine::experts_backward_saved":
            region_ids |= dict.fromkeys(node.args[8], node.args[6])
    return region_ids


def rows_by_symbol(graph: fx.Graph) -> dict[sympy.Symbol, sympy.Expr]:
    """Return N of each region of whose rows a run decides how many it saves, by the symbol of that number.

    Records have room for all rows; `GraphMemory.of_run` counts those that a run saves.
    """
    rows = {}
    for node in graph.nodes:
        name = qualified_name(node.target)
        if name == "memfine::experts_saving":
            saved, order = node.meta["val"][1], node.args[2]
        elif name == "memfine::experts_backward_saved":
            saved, order = node.args[8][0].meta["val"], node.args[3]
        else:
            continue
        number = size_expr(saved.shape[0])
        if number.is_Symbol:
            rows[number] = size_expr(order.meta["val"].shape[0])
    return rows


def _result_of(owner: fx.Node, made_by: fx.Node) -> tuple[str, int] | None:
    """Return the id of the region whose backward returns a node's storage, and its index among the results; None for
    other nodes.
    """
    if owner is made_by or _PHASES.get(qualified_name(made_by.target)) != "backward":
        return None
    return made_by.args[6], owner.args[1]  # type: ignore[return-value]  # of the op's schema


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _is_split(node: Any) -> bool:
    """Whether a node makes several views of one storage."""
    return is_view(node.target)


def _is_element(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return _name(node.target) == "getitem" and isinstance(source, fx.Node) and _is_tuple(source)


def peak_bytes_at(peaks: list[sympy.Expr], substitutions: dict[sympy.Symbol, int]) -> int:
    """The largest of `peaks` at given sizes; 0 where nothing is allocated."""
    return max((int(peak.subs(substitutions)) for peak in peaks), default=0)


def _owners(graph: fx.Graph, is_fused: bool) -> dict[fx.Node, fx.Node | None]:
    """Node -> the node whose storage holds its value; None where it is an argument's or fused away."""
    owners: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or not _is_tensor(node):
            owners[node] = _view_source(node, owners) if _is_view(node) else None
        elif _is_view(node):
            owners[node] = _view_source(node, owners)
        elif is_fused and _is_fused_away(node):
            owners[node] = None
        else:
            owners[node] = node
    return owners


def _view_source(node: fx.Node, owners: dict[fx.Node, fx.Node | None]) -> fx.Node | None:
    return owners.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None


def _last_readers(graph: fx.Graph, owners: dict[fx.Node, fx.Node | None]) -> dict[fx.Node, fx.Node]:
    """Owner -> last node that reads its storage, through views and through fused chains."""
    sources: dict[fx.Node, set[fx.Node]] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        read = set()
        for source in node.all_input_nodes:
            owner = owners.get(source)
            read |= {owner} if owner is not None else sources.get(source, set())
        if owners.get(node) is None:
            sources[node] = read
        for owner in {*read, *({node} if owners.get(node) is node else ())}:
            last[owner] = node
    return last


def _is_tensor(node: fx.Node) -> bool:
    return bool(_tensors(node))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """The results of a node: one, or several for a call that returns a tuple."""
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else [value]
    return [result for result in results if isinstance(result, torch.Tensor)]


def _is_view(node: fx.Node) -> bool:
    return is_view(node.target) or node.target is operator.getitem


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return op_name(target)
    return getattr(target, "__name__", "")


def _is_fused_away(node: fx.Node) -> bool:
    return (
        _is_pointwise(node.target)
        and not _is_complex(node)
        and all(_absorbs(user) for user in _users_through_views(node))
    )


def _users_through_views(node: fx.Node) -> list[fx.Node]:
    users: list[fx.Node] = []
    for user in node.users:
        users.extend(_users_through_views(user) if _is_view(user) else [user])
    return users


def _absorbs(user: fx.Node) -> bool:
    is_reduction = _name(user.target) in ("sum", "mean", "amax", "amin")
    return user.op != "output" and (_is_pointwise(user.target) or is_reduction) and not _is_complex(user)


def _is_complex(node: fx.Node) -> bool:
    """Whether a node makes complex numbers, which Inductor leaves to eager: nothing is fused with it."""
    return any(tensor.is_complex() for tensor in _tensors(node))


def _is_pointwise(target: Any) -> bool:
    return is_pointwise(target) or _name(target) in ("_to_copy", "clone", "cat")


def tensor_bytes(node: fx.Node) -> sympy.Expr:
    """Bytes of a node's results."""
    total: sympy.Expr = sympy.Integer(0)
    for value in _tensors(node):
        size: sympy.Expr = sympy.Integer(value.dtype.itemsize)
        shape: Any = value.shape
        for length in shape:
            size = size * size_expr(length)
        total = total + size
    return total
