"""From a raised region of a sharded model to the region that lowers: slices in the place of whole tables.

Before:  table = memfine::all_experts(slice, E, ...); seen = table.transpose(1, 2)      region.params = (seen, ...)
After:   seen = slice.transpose(1, 2)      region.params = (seen, ...), and who exchanges the rows

Tables of a region that is refused stay, and carry the refusal with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

import memfine_fx.expert_parallel.shard  # noqa: F401  # registers the ops
from memfine_fx.config import Axis
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.expert_parallel.groups import registered
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.sharded import ShardedExperts
from memfine_fx.passes.dataflow import node_value, provenance, target_name
from memfine_fx.passes.lower.region import recording
from memfine_fx.records import MoERegion, Refusal
from memfine_fx.runtime.params import group_params

__all__ = ["OWN_EXCHANGE", "drop_unread_tables", "own_exchanges", "sharded_experts", "tell_why_gathered"]

OWN_EXCHANGE = (
    "the model exchanges rows between ranks itself (all_to_all), in sizes that follow the routing; give it with all "
    "its experts and let optimize(..., expert_parallel=...) shard them"
)

_WHOLES = (torch.ops.memfine.all_experts.default, torch.ops.memfine.expert_of.default)


def sharded_experts(
    region: MoERegion, body_key: str, axis: Axis, chunk_rows: int, flops_per_row: int
) -> tuple[MoERegion, ShardedExperts | None]:
    """The region on this rank's experts, and their exchange; as it was, and None, where experts are not sharded.

    Args:
        region: from `read_regions`.
        body_key: content hash of its bodies, which every rank must share.
        axis: along which it is cut, which they share too.
        chunk_rows: the most rows of a chunk of what came in a round.
        flops_per_row: of its matmuls on one row, forward.

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
    paths = {node: _path_from_table(node) for node in nodes}
    sources = [path[0] for path in paths.values() if path[0].target in _WHOLES]
    if not sources:
        return region, None
    for node, path in paths.items():
        if path[0].target not in _WHOLES:
            raise CannotChunk(
                Reason.SHARDED, "experts are sharded, but this parameter of theirs is computed from whole tables", node
            )
    (key,) = {source.args[-3] for source in sources}
    assert isinstance(key, str)
    ranks = registered(key)
    placement = Placement(region.dims.num_experts, ranks.num_ranks)
    layer = region.where.module or str(region.where)
    hidden = node_value(region.hidden)
    assert isinstance(hidden, torch.Tensor)
    doing = (
        f"runs {layer} in rounds{', overlapping' if ranks.overlaps else ''}"
        f"{f', with {ranks.slots} slots for clones,' if ranks.slots else ''} "
        f"({region.dims.num_experts} experts, top-{region.dims.top_k}, {hidden.dtype}, body {body_key})"
    )
    params = tuple(_on_slice(paths[node]) if node in paths else node for node in region.params)
    return replace(region, params=params), ShardedExperts(
        ranks, placement, layer, doing, axis, chunk_rows, flops_per_row
    )


def tell_why_gathered(graph: fx.Graph, refusals: Sequence[Refusal]) -> None:
    """Let reads of whole tables that stay in a graph say why, for ranks whose layer was raised (`gathering`).

    Args:
        graph: rewritten.
        refusals: of its regions.
    """
    for node in graph.nodes:
        if node.target in _WHOLES:
            node.args = (*node.args[:-1], _reason(str(node.args[-2]), refusals))


def _reason(name: str, refusals: Sequence[Refusal]) -> str:
    """Why a parameter is gathered: the refusals nearest to it in the model."""
    if not refusals:
        return "code outside of any region reads it"
    shared = [_num_shared(name, one.where.module) for one in refusals]
    nearest = [one for one, number in zip(refusals, shared, strict=True) if number == max(shared)]
    return "; ".join(f"{one.where} was refused: {one.details}" for one in nearest)


def _num_shared(name: str, module: str) -> int:
    """How many names two paths begin with alike."""
    pairs = zip(name.split("."), module.split("."), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def own_exchanges(graph: fx.Graph) -> list[Refusal]:
    """A refusal for a graph whose code exchanges rows between ranks itself; nothing where it does not."""
    exchanges = (node for node in graph.nodes if node.op.startswith("call_") and "all_to_all" in target_name(node))
    return [
        Refusal(provenance(node), Reason.SHARDED, OWN_EXCHANGE, str(node)) for node in itertools.islice(exchanges, 1)
    ]


def _path_from_table(node: fx.Node) -> list[fx.Node]:
    """Nodes from where a parameter is read to `node`, as long as each acts on every expert alone."""
    path = [node]
    while path[0].target not in _WHOLES and _keeps_experts_apart(path[0]):
        source = path[0].args[0]
        assert isinstance(source, fx.Node)
        path.insert(0, source)
    return path


def _keeps_experts_apart(node: fx.Node) -> bool:
    """Whether a node moves or casts what stands behind the first dimension, and reads one tensor only."""
    name = target_name(node)
    value = node_value(node)
    if not isinstance(value, torch.Tensor) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if any(isinstance(leaf, fx.Node) for leaf in (*node.args[1:], *node.kwargs.values())):
        return False
    if name in ("to", "contiguous", "float", "half", "bfloat16", "clone"):
        return True
    if name in ("transpose", "swapaxes", "swapdims"):
        dims = [dim for dim in node.args[1:] if isinstance(dim, int)]
        return len(dims) == 2 and all(dim % value.ndim != 0 for dim in dims)
    return name == "permute" and tuple(node.args[1:])[:1] in ((0,), ([0],))


def _on_slice(path: list[fx.Node]) -> fx.Node:
    """The same path from this rank's slice."""
    first = path[0].args[0]
    assert isinstance(first, fx.Node)
    own = first
    for node in path[1:]:
        with recording(node.graph, node) as call:
            arguments = (own, *node.args[1:])
            if node.op == "call_method":
                own = call(getattr(torch.Tensor, str(node.target)), *arguments, **node.kwargs)
            else:
                own = call(node.target, *arguments, **node.kwargs)
    return own


def drop_unread_tables(graph_module: fx.GraphModule) -> None:
    """Erase reads of whole tables, and what was made of them, that nothing uses any more."""
    for node in reversed(list(graph_module.graph.nodes)):
        if not node.users and node.op != "output" and _path_from_table(node)[0].target in _WHOLES:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
