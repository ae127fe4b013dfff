"""A raised region as a `RegionGraph`: which of its operations route, dispatch, compute and combine.

Terms. Expert operations lie between the first and the last expert matmul; dispatch is what comes before them inside the
region, combine what comes after; the router is what makes the index and the weights and does not make the tokens.
Copies of one expert in an unrolled loop are drawn once, with their number.
"""

from __future__ import annotations

import re

import torch
from torch import fx

from memfine_fx.passes.dataflow import Dataflow, node_value
from memfine_fx.passes.ops import GROUPED_MATMULS, MATMULS, name_of, target_name
from memfine_fx.records import MoERegion
from memfine_fx.report.picture import PictureNode, RegionGraph, Role

__all__ = ["region_graph"]

_MAX_ROUTER_NODES = 24


def region_graph(region: MoERegion) -> RegionGraph:
    """The region and its router, before it is lowered."""
    flow = Dataflow(region.cut.exit.graph)
    roles = _roles(region, flow)
    nodes = sorted(roles, key=flow.position.__getitem__)
    kinds = _kinds(nodes, roles, flow) if region.family == "loops" else dict(zip(nodes, nodes, strict=True))
    members: dict[object, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(kinds[node], []).append(node)
    number = {kind: place for place, kind in enumerate(members)}
    edges = {
        (number[kinds[source]], number[kinds[node]]): None
        for node in nodes
        if roles[node] != "input"
        for source in flow.sources(node)
        if source in kinds and kinds[source] != kinds[node]
    }
    boxes = [PictureNode(_names(copies), _shape(copies[0]), roles[copies[0]]) for copies in members.values()]
    return RegionGraph(tuple(boxes), tuple(edges))


def _kinds(nodes: list[fx.Node], roles: dict[fx.Node, Role], flow: Dataflow) -> dict[fx.Node, object]:
    """The same kind for nodes that do the same for different experts: alike, and read nodes of the same kinds."""
    known: dict[tuple[object, ...], int] = {}
    kinds: dict[fx.Node, object] = {}
    for node in nodes:
        looks = (_name_of_all(node), re.sub(r"\bu\d+", "u", _shape(node)), roles[node], _place_in_tuple(node))
        reads = {kinds[source] for source in flow.sources(node) if source in kinds}
        reads -= {kind for look, kind in ((key[0], kind) for key, kind in known.items()) if look == looks}
        kinds[node] = known.setdefault((looks, frozenset(reads)), len(known))
    return kinds


def _name_of_all(node: fx.Node) -> str:
    """A name without the expert's number: parameters of a list of experts."""
    return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", _name(node))


def _place_in_tuple(node: fx.Node) -> object:
    """Which of several results a node is; which expert's part is no difference."""
    source = node.args[0] if target_name(node) == "getitem" and len(node.args) > 1 else None
    is_part = not isinstance(source, fx.Node) or target_name(source) in ("split", "unbind")
    return None if is_part or not isinstance(node.args[1], int) else node.args[1]


def _names(copies: list[fx.Node]) -> str:
    return _name(copies[0]) if len(copies) == 1 else f"{_name_of_all(copies[0])} \u00d7{len(copies)}"


def _roles(region: MoERegion, flow: Dataflow) -> dict[fx.Node, Role]:
    inside = [node for node in region.cut.nodes if _carries_tensors(node) or node in flow.mutations]
    matmuls = [node for node in inside if name_of(node) in MATMULS | GROUPED_MATMULS]
    after, before = flow.descendants(matmuls), flow.ancestors(matmuls)
    roles: dict[fx.Node, Role] = {}
    for node in inside:
        is_expert = node in matmuls or (node in after and node in before)
        roles[node] = "experts" if is_expert else "combine" if node in after or node not in before else "dispatch"
    for node in _router(region, flow):
        roles.setdefault(node, "router")
    for node in region.cut.inputs:
        if _carries_tensors(node):
            roles.setdefault(node, "input")
    return roles


def _router(region: MoERegion, flow: Dataflow) -> list[fx.Node]:
    decisions = [node for node in (region.expert_index, region.routing_weight) if node is not None]
    router_nodes = {*decisions, *flow.ancestors(decisions)} - {region.hidden, *flow.ancestors([region.hidden])}
    ordered = sorted(router_nodes, key=flow.position.__getitem__)
    return [node for node in ordered if _carries_tensors(node)][-_MAX_ROUTER_NODES:]


def _carries_tensors(node: fx.Node) -> bool:
    """A tensor or several (sort, chunk, top-k); sizes are no part of the picture."""
    value = node_value(node)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def _name(node: fx.Node) -> str:
    """Return the name of the operation that a node runs, or of the input whose value it is."""
    if node.op not in ("call_function", "call_method"):
        return _path(node.name)
    source = node.args[0] if node.args else None
    is_view = target_name(node) in ("transpose", "t", "permute") and isinstance(source, fx.Node)
    if is_view and isinstance(source, fx.Node) and source.op in ("placeholder", "get_attr"):
        return f"{_path(source.name).rpartition('.')[2]}, transposed"
    return target_name(node)


def _path(name: str) -> str:
    """A parameter's path without what tracing puts around it, its last parts; another input's name."""
    inner = re.sub(r"^(l_)?(self_)?", "", name).strip("_")
    parts = [part.strip("_") for part in re.split(r"(?:^|_)(?:modules|parameters|buffers)_", inner)]
    return ".".join(part for part in parts[-4:] if part) or name


def _shape(node: fx.Node) -> str:
    value = node_value(node)
    if not isinstance(value, torch.Tensor):
        return "several results"
    sizes = ", ".join(str(size) for size in value.shape)
    return f"[{sizes}] {str(value.dtype).removeprefix('torch.')}"
