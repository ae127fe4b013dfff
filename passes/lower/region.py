"""Lower: replace a raised region by one call of the chunked op.

Before:  sort, gather, expert matmuls, weighting, combine    (everything of the cut)
After:   order, offsets = memfine::route(expert_index, E)      (memfine::route_shared where experts are sharded,
                                                               memfine::route_on_device where GPU kernels run them)
         exit = memfine::experts(hidden, weight, order, offsets, params, region_id)

Steps: insert the calls where the exit stood; hand them its users; erase what nothing outside reads, last
first (in-place operations inside the region included; FX would keep them).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.autograd import enable_python_dispatcher, without_autocast
from memfine_fx.compat.tensors import FakeTensor, FakeTensorMode, tree_map
from memfine_fx.passes.dataflow import Dataflow, is_only_asserted, node_value, same_size, static_size, tensor_of
from memfine_fx.records import Cut, MoERegion

__all__ = ["Call", "erase_with_users", "lower_region", "recording"]


def lower_region(
    graph_module: fx.GraphModule,
    region: MoERegion,
    region_id: str,
    *,
    flow: Dataflow | None = None,
    table_shape: Sequence[int] | None = None,
    routes_on_device: bool = False,
) -> None:
    """Rewrite `region` in its graph.

    Args:
        graph_module: the graph that holds the region.
        region: from `read_regions` on this graph.
        region_id: key of the registered live region.
        flow: of the graph before its first region was lowered, where several are, last first; the caller recompiles it.
        table_shape: of the counts that ranks share, where its experts live on several of them.
        routes_on_device: whether its offsets need not come to the host.
    """
    graph = graph_module.graph
    exit_node = region.cut.exit
    hidden_size, top_k = region.dims.hidden, region.dims.top_k
    with recording(graph, exit_node) as call:
        tokens = region.expert_index
        if region.slot_dim is None:
            assert tokens is not None, "routed rows have an index, slots have a layout"
            hidden = _flat(call, region.hidden, hidden_size)
            index = _flat(call, tokens, top_k)
            if region.out_of_range == "from the end":
                index = call(
                    torch.where, call(operator.lt, index, 0), call(operator.add, index, region.dims.num_experts), index
                )
        else:
            hidden, index, sizes = _rows_of_slots(call, region, region.slot_dim)
        if table_shape is not None:
            route = call(
                torch.ops.memfine.route_shared.default, index, region.dims.num_experts, list(table_shape), region_id
            )
        else:
            op = torch.ops.memfine.route_on_device if routes_on_device else torch.ops.memfine.route
            route = call(op.default, index, region.dims.num_experts)
        order, offsets = call(operator.getitem, route, 0), call(operator.getitem, route, 1)
        weight = _routing_weight(call, region, index)
        combined = call(
            torch.ops.memfine.experts.default, hidden, weight, order, offsets, list(region.params), region_id
        )
        if region.slot_dim is not None:
            combined = _slots_of_rows(call, combined, sizes, region, region.slot_dim)
        else:
            assert tokens is not None
            combined = _shaped_as(call, combined, exit_node, tokens)
        if region.base is not None:
            combined = call(operator.add, region.base, combined)
    if flow is not None:
        flow.place_inserted(exit_node)
        _replace(flow, region.cut, combined)
        return
    _replace(Dataflow(graph), region.cut, combined)
    graph.lint()
    graph_module.recompile()


_PROVENANCE_META = ("nn_module_stack", "source_fn_stack", "stack_trace")
Call = Callable[..., fx.Node]


@contextlib.contextmanager
def recording(graph: fx.Graph, place: fx.Node) -> Iterator[Call]:
    """Calls inserted before `place`, each with its provenance and its fake result."""

    fake_mode = _fake_mode(place)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta.update({key: value for key, value in place.meta.items() if key in _PROVENANCE_META})
        values: Any = tree_map(lambda leaf: node_value(leaf) if isinstance(leaf, fx.Node) else leaf, args)
        # Autocast of the capture would cast the fake results of calls that stand outside of it.
        with fake_mode, torch.no_grad(), without_autocast(), enable_python_dispatcher():
            node.meta["example_value"] = target(*values, **kwargs)
        return node

    with graph.inserting_before(place):
        yield call


def _fake_mode(node: fx.Node) -> FakeTensorMode:
    value = node_value(node)
    assert isinstance(value, FakeTensor)
    return value.fake_mode


def _flat(call: Call, node: fx.Node, width: int) -> fx.Node:
    """[...,width] (or [...] for a width of one) as [T,width]."""
    value = tensor_of(node)
    is_flat = value.ndim == 2 and static_size(value.shape[1]) == width
    return node if is_flat else call(torch.reshape, node, (-1, width))


def _routing_weight(call: Call, region: MoERegion, index: fx.Node) -> fx.Node | None:
    if region.routing_weight is None:
        return None
    if not region.gathers_weight:
        return _flat(call, region.routing_weight, region.dims.top_k)
    if region.weight_columns:
        columns = [call(torch.reshape, column, (-1,)) for column in region.weight_columns]
        weights = call(torch.stack, columns, 1)
    else:
        width = static_size(tensor_of(region.routing_weight).shape[-1])
        weights = _flat(call, region.routing_weight, width or region.dims.num_experts)
    ids = call(torch.ops.aten.to.dtype, index, torch.int64)
    if region.out_of_range in ("dropped", "larger dropped"):  # the weight of a dropped row is read, but never used
        width = static_size(tensor_of(weights).shape[-1])
        ids = call(torch.clamp, ids, 0, (width or region.dims.num_experts) - 1)
    return call(torch.gather, weights, 1, ids)


def _shaped_as(call: Call, rows: fx.Node, exit_node: fx.Node, tokens: fx.Node) -> fx.Node:
    """[T,H] in the shape of what it replaces: [T,1,H], or [B,S,H] with the sizes of `tokens`."""
    value, own = tensor_of(exit_node), tensor_of(rows)
    if value.ndim == own.ndim:
        return rows
    if value.ndim == 3 and same_size(value.shape[1], 1):
        return call(torch.unsqueeze, rows, 1)
    sizes = [call(torch.ops.aten.sym_size.int, tokens, dim) for dim in range(value.ndim - 1)]
    return call(torch.reshape, rows, (*sizes, own.shape[-1]))


def _rows_of_slots(call: Call, region: MoERegion, slot_dim: int) -> tuple[fx.Node, fx.Node, list[fx.Node]]:
    """Slots as rows in expert order, [E*C,H]; each row's expert, [E*C,1]; the sizes between E and H."""
    moved = call(torch.movedim, region.hidden, slot_dim, 0)
    sizes = [call(torch.ops.aten.sym_size.int, moved, dim) for dim in range(1, tensor_of(region.hidden).ndim - 1)]
    num_experts = region.dims.num_experts
    device = tensor_of(region.hidden).device
    experts = call(
        torch.reshape, call(torch.ops.aten.arange.default, num_experts, device=device), (num_experts, *[1] * len(sizes))
    )
    index = call(torch.reshape, call(torch.ops.aten.expand.default, experts, (num_experts, *sizes)), (-1, 1))
    return call(torch.reshape, moved, (-1, region.dims.hidden)), index, sizes


def _slots_of_rows(call: Call, rows: fx.Node, sizes: list[fx.Node], region: MoERegion, slot_dim: int) -> fx.Node:
    shape = (region.dims.num_experts, *sizes, tensor_of(rows).shape[-1])
    return call(torch.movedim, call(torch.reshape, rows, shape), 0, slot_dim)


def _replace(flow: Dataflow, cut: Cut, result: fx.Node) -> None:
    """Hand the exit's readers to `result`; erase the inside, last first, except what others still read.

    NOTE: an exit that writes in place (out.index_add_) is read through its target as well, and a write into
    a tensor that survives must survive with it: FX draws no edge for either.
    """
    last = flow.position[cut.exit]
    for target in flow.mutations.get(cut.exit, ()):
        for user in list(target.users):
            if flow.position[user] > last:
                user.replace_input_with(target, result)
    cut.exit.replace_all_uses_with(result)
    _erase_assertions(cut)
    # Last first, so that a node's readers inside are gone when its turn comes; what another region shares may be too.
    left = set(flow.graph.nodes)
    for node in reversed(cut.nodes):
        if node in left and not node.users and (node is cut.exit or not _writes_for_survivors(flow, node)):
            flow.graph.erase_node(node)


def _erase_assertions(cut: Cut) -> None:
    """Drop assertions about sizes inside the cut: they would keep alive what they read."""
    inside = set(cut.nodes)
    for node in cut.nodes:
        # Erasing one assertion may take others with it, so the list is looked up again.
        for user in list(node.users):
            if user in node.users and user not in inside and is_only_asserted(user):
                erase_with_users(user)


def erase_with_users(node: fx.Node) -> None:
    """Erase a node and all that is computed of it."""
    for user in list(node.users):
        if user in node.users:  # else it went with another
            erase_with_users(user)
    node.graph.erase_node(node)


def _writes_for_survivors(flow: Dataflow, node: fx.Node) -> bool:
    """Whether something still in the graph reads, later, what `node` wrote in place."""
    # Positions decide, since FX draws no edge from a write to what reads the same storage later.
    readers = {
        user for target in flow.mutations.get(node, ()) for alias in flow.aliases(target) for user in alias.users
    }
    return any(flow.position[user] > flow.position[node] for user in readers)
