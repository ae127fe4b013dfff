"""Put this rank's slices in the place of whole tables of expert weights, in a raised region of a sharded model.

Before:  table = memfine::all_experts(slice, E, ...); seen = table.transpose(1, 2)      region.params = (seen, ...)
After:   seen = slice.transpose(1, 2)      region.params = (seen, ...), and who exchanges the rows

A tensor that every rank has whole and that is not trained (scales of packed numbers) is sliced where it stands:

Before:  scales [E,...]                    After:  own = scales[first:last]

Tables of a refused region stay in the graph, and carry the refusal with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from memfine_fx.compat.operators import qualified_name
from memfine_fx.config import Axis
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import computed_from, node_value, provenance, static_size, tensor_of
from memfine_fx.passes.lower.region import recording
from memfine_fx.passes.ops import target_name
from memfine_fx.records import MoERegion, ParamKind, Refusal
from memfine_fx.runtime.routing import group_params

if TYPE_CHECKING:
    from memfine_fx.expert_parallel.sharded import ShardedExperts

__all__ = ["OWN_EXCHANGE", "drop_unread_tables", "own_exchanges", "say_why_gathered", "sharded_experts"]

OWN_EXCHANGE = (
    "the model exchanges rows between ranks itself (all_to_all), in sizes that follow the routing; give it with all "
    "its experts and let optimize(..., expert_parallel=...) shard them"
)

_WHOLES = frozenset(("memfine::all_experts", "memfine::expert_of"))
"""Operators of `expert_parallel`, which is loaded where a graph holds one of them, and imported here only then."""
_RESHAPES = ("reshape", "view", "flatten", "unflatten")


def sharded_experts(
    region: MoERegion, body_key: str, axis: Axis, chunk_rows: int, flops_per_row: int
) -> tuple[MoERegion, ShardedExperts | None]:
    """The region on this rank's experts, and their exchange; as it was, and None, where experts are not sharded.

    Args:
        region: from `read_regions`.
        body_key: content hash of its compiled functions, which every rank must share.
        axis: along which it is cut, which they share too.
        chunk_rows: the most rows of a chunk of what came in a round.
        flops_per_row: of its matmuls on one row, forward.

    Raises:
        CannotChunk: only some of its parameters are sharded.
    """
    groups = group_params(region.params, region.expert_fn.param_kinds, region.dims.num_experts)
    kinds = {
        node: kind
        for kind, group in zip(region.expert_fn.param_kinds, groups, strict=True)
        for node in group
        if kind != "shared"
    }
    paths = {node: _path_from_table(node) for node in kinds}
    sources = [path[0] for path in paths.values() if _reads_whole(path[0])]
    if not sources:
        return region, None
    from memfine_fx.expert_parallel.groups import registered
    from memfine_fx.expert_parallel.placement import Placement
    from memfine_fx.expert_parallel.sharded import ShardedExperts

    (key,) = {source.args[-3] for source in sources}
    assert isinstance(key, str)
    ranks = registered(key)
    placement = Placement(region.dims.num_experts, ranks.num_ranks)
    owned = placement.owned(ranks.rank)
    own = {
        node: _on_slice(path) if _reads_whole(path[0]) else _slice_of(node, kinds[node], region, owned)
        for node, path in paths.items()
    }
    layer = region.where.module or str(region.where)
    hidden = node_value(region.hidden)
    assert isinstance(hidden, torch.Tensor)
    doing = (
        f"runs {layer} in rounds{', overlapping' if ranks.overlaps else ''}"
        f"{f', with {ranks.slots} slots for clones,' if ranks.slots else ''} "
        f"({region.dims.num_experts} experts, top-{region.dims.top_k}, {hidden.dtype}, function {body_key})"
    )
    params = tuple(own.get(node, node) for node in region.params)
    tables = [tensor_of(node) for node, kind in kinds.items() if kind == "expert"]
    num_trained = sum(math.prod(table.shape[1:]) for table in tables if table.requires_grad)
    return replace(region, params=params), ShardedExperts(
        ranks, placement, layer, doing, axis, chunk_rows, flops_per_row, num_trained
    )


def say_why_gathered(graph: fx.Graph, refusals: Sequence[Refusal]) -> None:
    """Let reads of whole tables that stay in a graph say why, for ranks whose layer was raised (`gathering`).

    Args:
        graph: rewritten.
        refusals: of its regions.
    """
    for node in graph.nodes:
        if _reads_whole(node):
            node.args = (*node.args[:-1], _reason(str(node.args[-2]), refusals))


def _reason(name: str, refusals: Sequence[Refusal]) -> str:
    """Why a parameter is gathered: the refusals nearest to it in the model."""
    if not refusals:
        return "code outside of any region reads it"
    shared = [_num_shared(name, refusal.where.module) for refusal in refusals]
    nearest = [refusal for refusal, number in zip(refusals, shared, strict=True) if number == max(shared)]
    return "; ".join(f"{refusal.where} was refused: {refusal.details}" for refusal in nearest)


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


def _reads_whole(node: fx.Node) -> bool:
    """Return whether a node gathers the parameters of experts that ranks share out."""
    return node.op == "call_function" and qualified_name(node.target) in _WHOLES


def _path_from_table(node: fx.Node) -> list[fx.Node]:
    """Nodes from where a parameter is read to `node`, as long as each acts on every expert alone."""
    path = [node]
    while not _reads_whole(path[0]):
        source = _same_experts(path[0])
        if source is None:
            break
        path.insert(0, source)
    return path


def _same_experts(node: fx.Node) -> fx.Node | None:
    """The tensor [E,...] of which a node moves or casts what stands behind the first dimension; None for others."""
    value, source = node_value(node), node.args[0] if node.args else None
    if not isinstance(value, torch.Tensor) or not isinstance(source, fx.Node):
        return None
    if any(isinstance(leaf, fx.Node) for leaf in (*node.args[1:], *node.kwargs.values())):
        return None
    name = target_name(node)
    if _is_reshape(node):
        # Numbers keep their order, so that an expert's are the same ones, whatever shapes lie between.
        source = _behind_reshapes(source, _num_first(node))
        return source if _num_first(source) == _num_first(node) is not None else None
    if name in ("to", "contiguous", "float", "half", "bfloat16", "clone"):
        return source
    if name in ("transpose", "swapaxes", "swapdims"):
        dims = [dim for dim in node.args[1:] if isinstance(dim, int)]
        return source if len(dims) == 2 and all(dim % value.ndim != 0 for dim in dims) else None
    return source if name == "permute" and tuple(node.args[1:])[:1] in ((0,), ([0],)) else None


def _behind_reshapes(node: fx.Node, num_first: int | None) -> fx.Node:
    """The tensor with so many entries along its first dimension, or which is no reshape, that stands behind a node."""
    while _is_reshape(node) and _num_first(node) != num_first:
        node = node.args[0]  # type: ignore[assignment]  # a node
    return node


def _is_reshape(node: fx.Node) -> bool:
    """Whether a node gives a tensor other dimensions; a view in another dtype has the same name and does more."""
    source = node.args[0] if node.args else None
    if target_name(node) not in _RESHAPES or not isinstance(source, fx.Node):
        return False
    value, before = node_value(node), node_value(source)
    return isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and value.dtype is before.dtype


def _num_first(node: fx.Node) -> int | None:
    value = node_value(node)
    return static_size(value.shape[0]) if isinstance(value, torch.Tensor) and value.ndim else None


def _on_slice(path: list[fx.Node]) -> fx.Node:
    """The same path from this rank's slice."""
    first = path[0].args[0]
    assert isinstance(first, fx.Node)
    own = first
    for node in path[1:]:
        with recording(node.graph, node) as call:
            if _is_reshape(node):  # sizes that are left open are none where a rank has no expert
                own = call(torch.reshape, own, (_num_first(own), *tensor_of(node).shape[1:]))
            elif node.op == "call_method":
                own = call(getattr(torch.Tensor, str(node.target)), own, *node.args[1:], **node.kwargs)
            else:
                own = call(node.target, own, *node.args[1:], **node.kwargs)
    return own


def _slice_of(node: fx.Node, kind: ParamKind, region: MoERegion, owned: range) -> fx.Node:
    """This rank's part of what every rank has whole.

    Raises:
        CannotChunk: it is trained, and each rank would have the gradient of its own rows alone; or it is made of tables
            that are shared out.
    """
    if tensor_of(node).requires_grad or any(_reads_whole(source) for source in computed_from([node])):
        raise CannotChunk(
            Reason.SHARDED, "experts are sharded, but this parameter of theirs is computed from whole tables", node
        )
    if kind == "each":  # of which a rank reads its own experts' alone
        return node
    with recording(node.graph, region.cut.exit) as call:
        return call(torch.ops.aten.slice.Tensor, node, 0, owned.start, owned.stop)


def drop_unread_tables(graph_module: fx.GraphModule) -> None:
    """Erase reads of whole tables, and what was made of them, that nothing uses any more."""
    for node in reversed(list(graph_module.graph.nodes)):
        is_unread = not node.users and node.op != "output"
        if is_unread and _reads_whole(_path_from_table(_behind_reshapes(node, -1))[0]):
            graph_module.graph.erase_node(node)
    graph_module.recompile()
