"""From a raised region of a sharded model to the region that lowers: slices in the place of whole tables.

Before:  table = memfine::all_experts(slice, E, key)      region.params = (table, ...)
After:   region.params = (slice, ...), and who exchanges the rows
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

import memfine_fx.expert_parallel.shard  # noqa: F401  # registers the ops
from memfine_fx.errors import CannotChunk
from memfine_fx.expert_parallel.exchange import fingerprint
from memfine_fx.expert_parallel.groups import registered
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.sharded import ShardedExperts
from memfine_fx.passes.dataflow import node_value
from memfine_fx.records import MoERegion
from memfine_fx.runtime.params import group_params

__all__ = ["drop_unread_tables", "sharded_experts"]

_TABLE, _EXPERT = torch.ops.memfine.all_experts.default, torch.ops.memfine.expert_of.default


def sharded_experts(region: MoERegion, body_key: str) -> tuple[MoERegion, ShardedExperts | None]:
    """The region on this rank's experts, and their exchange; as it was, and None, where experts are not sharded.

    Args:
        region: from `raise_region`.
        body_key: content hash of its bodies, which every rank must share.

    Raises:
        CannotChunk: only some of its parameters are sharded.
    """
    groups = group_params(region.params, region.expert_fn.param_kinds, region.dims.num_experts)
    nodes = [
        node
        for kind, group in zip(region.expert_fn.param_kinds, groups, strict=True)
        for node in group
        if kind != "shared"
    ]
    sharded = [node for node in nodes if node.target in (_TABLE, _EXPERT)]
    if not sharded:
        return region, None
    for node in nodes:
        if node not in sharded:
            raise CannotChunk("experts are sharded, but this parameter of theirs is computed from the whole", node)
    (key,) = {node.args[-1] for node in sharded}
    assert isinstance(key, str)
    ranks = registered(key)
    placement = Placement(region.dims.num_experts, ranks.num_ranks)
    params = tuple(_slice(node) for node in region.params)
    layer = region.where.module or str(region.where)
    hidden = node_value(region.hidden)
    assert isinstance(hidden, torch.Tensor)
    mark = fingerprint(layer, region.dims.num_experts, region.dims.top_k, str(hidden.dtype), body_key, ranks.overlaps)
    return replace(region, params=params), ShardedExperts(ranks, placement, layer, mark)


def drop_unread_tables(graph_module: fx.GraphModule) -> None:
    """Erase reads of whole tables that nothing uses any more."""
    for node in reversed(list(graph_module.graph.nodes)):
        if node.target in (_TABLE, _EXPERT) and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def _slice(node: fx.Node) -> fx.Node:
    if node.target not in (_TABLE, _EXPERT):
        return node
    own = node.args[0]
    assert isinstance(own, fx.Node)
    return own
