"""A raised region as a `RegionGraph`: which of its operations route, dispatch, compute and combine.

Terms. Expert operations lie between the first and the last expert matmul; dispatch is what comes before them inside the
region, combine what comes after; the router is what makes the index and the weights and does not make the tokens.
"""

from __future__ import annotations

import torch
from torch import fx

from memfine_fx.passes.dataflow import Dataflow, node_value, target_name
from memfine_fx.passes.find import GROUPED_MATMULS, MATMULS
from memfine_fx.picture import PictureNode, RegionGraph, Role
from memfine_fx.records import MoERegion

__all__ = ["region_graph"]

_MAX_ROUTER_NODES = 24


def region_graph(region: MoERegion) -> RegionGraph:
    """The region and its router, before it is lowered."""
    flow = Dataflow(region.cut.exit.graph)
    roles = _roles(region, flow)
    nodes = sorted(roles, key=flow.position.__getitem__)
    number = {node: place for place, node in enumerate(nodes)}
    edges = [
        (number[source], number[node])
        for node in nodes
        if roles[node] != "input"
        for source in flow.digraph.predecessors(node)
        if source in number
    ]
    return RegionGraph(tuple(PictureNode(_name(node), _shape(node), roles[node]) for node in nodes), tuple(edges))


def _roles(region: MoERegion, flow: Dataflow) -> dict[fx.Node, Role]:
    inside = [node for node in region.cut.nodes if _carries_tensors(node) or node in flow.mutations]
    matmuls = [node for node in inside if target_name(node) in MATMULS | GROUPED_MATMULS]
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
    made = {*decisions, *flow.ancestors(decisions)} - {region.hidden, *flow.ancestors([region.hidden])}
    ordered = sorted(made, key=flow.position.__getitem__)
    return [node for node in ordered if _carries_tensors(node)][-_MAX_ROUTER_NODES:]


def _carries_tensors(node: fx.Node) -> bool:
    """A tensor or several (sort, chunk, top-k); sizes are no part of the picture."""
    value = node_value(node)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return any(isinstance(one, torch.Tensor) for one in value)
    return isinstance(value, torch.Tensor)


def _name(node: fx.Node) -> str:
    """What a node does, or whose value it is."""
    if node.op not in ("call_function", "call_method"):
        return node.name.removeprefix("l_self_modules_").removeprefix("l_").rstrip("_")
    return target_name(node)


def _shape(node: fx.Node) -> str:
    value = node_value(node)
    if not isinstance(value, torch.Tensor):
        return "several results"
    sizes = ", ".join(str(size) for size in value.shape)
    return f"[{sizes}] {str(value.dtype).removeprefix('torch.')}"
