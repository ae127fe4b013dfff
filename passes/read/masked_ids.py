"""Tokens that a mask takes out of every expert's rows: the mask is moved into the ids, where reading understands it.

    mask = (ids == e) & valid      for each e          masked = where(valid, ids, E)      an id that no expert has
                                                       mask = masked == e

Both say the same of every entry, because E is compared with no id. Where all tokens are valid, `masked` is the ids. The
written nodes stay in the graph without readers, and get them back where nothing is lowered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.compat.tensors import FakeTensor
from memfine_fx.passes.dataflow import is_int_tensor, node_value, same_size, tensor_of
from memfine_fx.passes.ops import LAYOUTS, name_of
from memfine_fx.passes.read.no_rows import GraphIndex, is_mask

__all__ = ["move_masks_into_ids", "restore_masks"]

_WRITTEN = "memfine_written_mask"
"""Key of a node's meta: the node that it stands for."""
_MOVED = "memfine_moved_mask"
"""Key of the meta of a node that another stands for."""
_OWN = ("logical_and", "bitwise_and", "eq", "where")


def move_masks_into_ids(graph: fx.Graph) -> None:
    """Rewrite masks of one expert's valid tokens, where several experts have the same ids and the same valid tokens."""
    masks = [node for node in graph.nodes if name_of(node) in ("logical_and", "bitwise_and")]
    parts = {node: _parts_of(node) for node in masks}
    if not any(parts.values()):
        return
    index = GraphIndex(graph)
    groups: dict[object, list[fx.Node]] = {}
    for node in masks:
        split = parts[node]
        if split is not None and not any(map(index.flow.is_written, (node, *node.all_input_nodes, *split[:2]))):
            ids, valid, _ = split
            groups.setdefault((ids, repr(index.key(valid))), []).append(node)
    for group in groups.values():
        experts = {part[2] for node in group if (part := parts[node]) is not None}
        if len(experts) > 1 and min(experts) >= 0:
            _move(group, parts, 1 + max(experts))


def restore_masks(graph_module: fx.GraphModule) -> None:
    """Give masks that are left in a graph their written form back, and erase what nothing reads."""
    moved = [node for node in graph_module.graph.nodes if _WRITTEN in node.meta]
    for node in moved:
        node.replace_all_uses_with(node.meta[_WRITTEN])
    marked = [node for node in graph_module.graph.nodes if _MOVED in node.meta]
    for node in reversed([*moved, *marked]):
        _erase_unread(graph_module.graph, node)
    if marked:
        graph_module.recompile()


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nothing reads, and of what it reads masks, comparisons and masked ids."""
    if node.users or name_of(node) not in _OWN:
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        _erase_unread(graph, source)


def _parts_of(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """(ids, valid, e) of `(ids == e) & valid`, where entries of `valid` are about entries of the ids."""
    if len(node.args) != 2 or node.kwargs or not all(map(is_mask, node.args)):
        return None
    for named, valid in (node.args, node.args[::-1]):
        assert isinstance(named, fx.Node) and isinstance(valid, fx.Node)
        ids, number = named.args if name_of(named) == "eq" and len(named.args) == 2 else (None, None)
        if not isinstance(ids, fx.Node) or not is_int_tensor(ids) or type(number) is not int:
            continue
        shape = tensor_of(ids).shape
        if len(tensor_of(node).shape) == len(shape) and all(map(same_size, tensor_of(node).shape, shape)):
            return ids, valid, number
    return None


def _move(group: list[fx.Node], parts: dict[fx.Node, Any], no_expert: int) -> None:
    ids, valid, _ = parts[group[0]]
    masked = ids
    if not _is_all_ones(valid):
        with ids.graph.inserting_before(group[0]):
            masked = _call(group[0], torch.where, valid, ids, no_expert)
    for node in group:
        with ids.graph.inserting_before(node):
            moved = _call(node, torch.eq, masked, parts[node][2])
        node.replace_all_uses_with(moved)
        moved.meta[_WRITTEN] = node
        node.meta[_MOVED] = True


def _is_all_ones(node: fx.Node) -> bool:
    while name_of(node) in LAYOUTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return name_of(node) in ("ones", "ones_like", "new_ones")


def _call(place: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call with its fake result, in the provenance of another."""
    node = place.graph.call_function(target, args)
    node.meta.update({key: value for key, value in place.meta.items() if key not in ("example_value", "val")})
    values = [node_value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    fake = next(value for value in values if isinstance(value, FakeTensor))
    with fake.fake_mode, torch.no_grad():
        node.meta["example_value"] = target(*values)
    return node
