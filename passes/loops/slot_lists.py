"""Lists of experts over slots: a buffer [E,C,H] taken apart, one expert on each part, the results put together.

    parts = buffer.chunk(E, dim)                                       (or split, unbind, buffer[e])
    out = cat([expert_0(parts[0]), expert_1(parts[1]), ...], dim)      (or stack)

Only the form of such a list is recognised here; that its copies are one expert is told by `slot_roll`. Routing,
capacity and combine stay outside. No list: parts that are not the experts' in order, results that no routing combines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfine_fx.passes.dataflow import Dataflow, is_float_tensor, is_int_tensor, node_value, static_size, target_name
from memfine_fx.records import Cut

__all__ = ["SlotList", "slot_lists"]

_TAKES_APART = frozenset("chunk split unbind tensor_split".split())
_VIEWS = frozenset("view reshape permute transpose to contiguous type_as movedim flatten unflatten squeeze".split())
_PICKS = frozenset("getitem index_select gather index_add index_add_ scatter_add scatter_add_".split())
_SCALES = frozenset("mul __mul__ mul_ __rmul__".split())
_PRODUCTS = frozenset("einsum matmul bmm mm __matmul__".split())
_MAX_NODES = 64
"""Operations of one expert; more are hardly an expert."""


@dataclass(frozen=True)
class _Part:
    """Entry `expert` of `source` along `dim`, which stays as a dimension of one or goes."""

    source: fx.Node
    dim: int
    expert: int
    keeps_dim: bool


@dataclass(frozen=True)
class SlotList:
    """A list of experts over slots, in the captured graph.

    Args:
        cut: from the buffer's parts to the results put together.
        rows: the buffer.
        dim: its dimension of experts.
        keeps_dim: whether a part keeps that dimension.
        first: expert 0's part, and its result.
    """

    cut: Cut
    rows: fx.Node
    dim: int
    keeps_dim: bool
    first: tuple[fx.Node, fx.Node]


def slot_lists(flow: Dataflow, routed: set[fx.Node]) -> Iterator[SlotList]:
    """Lists over buffers that a routing fills and whose results it combines, in graph order.

    Args:
        routed: what the routing reaches.
    """
    for node in flow.graph.nodes:
        if target_name(node) in ("cat", "concat", "stack") and node in routed:
            found = _slot_list(flow, node)
            if found is not None and found.rows in routed and _is_combined(node, routed):
                yield found


def _slot_list(flow: Dataflow, exit_node: fx.Node) -> SlotList | None:
    results = exit_node.args[0] if exit_node.args else None
    if not isinstance(results, (list, tuple)) or len(results) < 2:
        return None
    entries = [_entry_of(result) for result in results]
    parts = [None if entry is None else _part(entry) for entry in entries]
    first = parts[0]
    if first is None or [part and part.expert for part in parts] != list(range(len(parts))):
        return None
    same = {(part.source, part.dim, part.keeps_dim) for part in parts if part is not None}
    rows = node_value(first.source)
    assert isinstance(rows, torch.Tensor)
    is_whole = static_size(rows.shape[first.dim]) == len(parts) and rows.ndim >= 3 and first.dim < rows.ndim - 1
    dim = exit_node.args[1] if len(exit_node.args) > 1 else exit_node.kwargs.get("dim", 0)
    value = node_value(exit_node)
    is_cat = target_name(exit_node) != "stack"
    fits = isinstance(value, torch.Tensor) and isinstance(dim, int) and dim % value.ndim == first.dim
    if len(same) > 1 or not is_whole or not fits or is_cat is not first.keeps_dim:
        return None
    inside = flow.descendants([first.source]) & (flow.ancestors([exit_node]) | {exit_node})
    nodes = tuple(sorted(inside, key=flow.position.__getitem__))
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    cut = Cut(None, exit_node, nodes, tuple(inputs))
    return SlotList(cut, first.source, first.dim, first.keeps_dim, (entries[0], results[0]))  # type: ignore[arg-type]


def _entry_of(result: Any) -> fx.Node | None:
    """The one part that a result is made of, parameters aside."""
    pending, seen, found = [result], {result}, set()
    while pending and len(seen) < _MAX_NODES:
        node = pending.pop()
        if not isinstance(node, fx.Node):
            return None
        if node is not result and _part(node) is not None:
            found.add(node)
            continue
        if node.op in ("placeholder", "get_attr"):
            if not isinstance(node_value(node), torch.nn.Parameter):
                return None
            continue
        sources = [source for source in node.all_input_nodes if source not in seen]
        seen.update(sources)
        pending.extend(sources)
    return found.pop() if len(found) == 1 and not pending else None


def _part(node: fx.Node) -> _Part | None:
    """What a node takes out of a tensor of activations, if it takes one entry of a dimension."""
    if target_name(node) == "select" and len(node.args) == 3:
        return _checked(_Part(node.args[0], node.args[1], node.args[2], False))  # type: ignore[arg-type]  # checked
    if target_name(node) != "getitem":
        return None
    source, place = node.args
    if not isinstance(source, fx.Node):
        return None
    if target_name(source) in _TAKES_APART and isinstance(place, int):
        name = target_name(source)
        position = 1 if name == "unbind" else 2
        dim = source.args[position] if len(source.args) > position else source.kwargs.get("dim", 0)
        return _checked(_Part(source.args[0], dim, place, name != "unbind"), node)  # type: ignore[arg-type]  # checked
    places: tuple[Any, ...] = place if isinstance(place, tuple) else (place,)
    is_entry = all(one == slice(None) for one in places[:-1]) and isinstance(places[-1], int)
    return _checked(_Part(source, len(places) - 1, places[-1], False)) if is_entry else None


def _checked(part: _Part, node: fx.Node | None = None) -> _Part | None:
    """The part with its dimension counted from the front; None where it is none, or of a parameter."""
    value = node_value(part.source) if isinstance(part.source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or not is_float_tensor(part.source):
        return None
    if not isinstance(part.dim, int) or not isinstance(part.expert, int) or part.expert < 0:
        return None
    dim = part.dim % value.ndim
    own = None if node is None else node_value(node)
    is_one = own is None or not part.keeps_dim or (isinstance(own, torch.Tensor) and static_size(own.shape[dim]) == 1)
    return _Part(part.source, dim, part.expert, part.keeps_dim) if is_one else None


def _is_combined(exit_node: fx.Node, routed: set[fx.Node]) -> bool:
    """Whether the results meet a mask or weights of the routing in a product, or are taken or added by its index."""
    pending = [exit_node]
    while pending:
        node = pending.pop()
        for user in node.users:
            others = [source for source in user.all_input_nodes if source is not node and source in routed]
            is_picked = target_name(user) in _PICKS and any(map(is_int_tensor, others))
            if target_name(user) in _VIEWS or target_name(user) in _SCALES:
                pending.append(user)
            elif is_picked or (target_name(user) in _PRODUCTS and others):
                return True
    return False
