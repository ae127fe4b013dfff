"""Lower: replace a raised region by one call of the chunked op.

Before:  sort, gather, expert matmuls, weighting, combine    (everything of the cut)
After:   order, offsets = memfine::route(expert_index, E)
         exit = memfine::experts(hidden, weight, order, offsets, params, site)

Steps: insert the calls where the exit stood; hand them its users; erase what nothing outside reads, last
first (in-place operations inside the region included; FX would keep them).

`insert_identity` is the control: the outlined region as a submodule in its own place, changing nothing.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from memfine_fx.passes.dataflow import Dataflow, is_only_asserted, node_value
from memfine_fx.passes.normalize import outline
from memfine_fx.records import Cut, MoERegion

__all__ = ["insert_identity", "lower_region"]


def lower_region(graph_module: fx.GraphModule, region: MoERegion, site: str) -> None:
    """Rewrite `region` in its graph.

    Args:
        graph_module: the graph that holds the region.
        region: from `raise_region` on this graph.
        site: key of the registered live region.
    """
    graph = graph_module.graph
    exit_node = region.cut.exit
    with graph.inserting_before(exit_node):
        route = graph.call_function(torch.ops.memfine.route.default, (region.expert_index, region.dims.num_experts))
        order = graph.call_function(operator.getitem, (route, 0))
        offsets = graph.call_function(operator.getitem, (route, 1))
        arguments = (region.hidden, region.routing_weight, order, offsets, list(region.params), site)
        combined = graph.call_function(torch.ops.memfine.experts.default, arguments)
    for node in (route, order, offsets, combined):
        node.meta.update({key: value for key, value in exit_node.meta.items() if key in _PROVENANCE_META})
    _record_values(region, route, order, offsets)
    combined.meta["example_value"] = node_value(exit_node)
    _replace(graph, region.cut, combined)
    graph.lint()
    graph_module.recompile()


_PROVENANCE_META = ("nn_module_stack", "source_fn_stack", "stack_trace")


def _record_values(region: MoERegion, route: fx.Node, order: fx.Node, offsets: fx.Node) -> None:
    index = node_value(region.expert_index)
    assert isinstance(index, torch._subclasses.FakeTensor)
    with index.fake_mode:
        value = torch.ops.memfine.route.default(index, region.dims.num_experts)
    route.meta["example_value"] = value
    order.meta["example_value"], offsets.meta["example_value"] = value


def insert_identity(graph_module: fx.GraphModule, region: MoERegion, name: str) -> None:
    """Put the outlined region back in its own place, as a submodule."""
    outlined, inputs = outline(region.cut, specializes_floats=False)
    graph = graph_module.graph
    exit_node = region.cut.exit
    graph_module.add_submodule(name, outlined)
    with graph.inserting_before(exit_node):
        call = graph.call_module(name, tuple(inputs))
    call.meta["example_value"] = node_value(exit_node)
    _replace(graph, region.cut, call)
    graph.lint()
    graph_module.recompile()


def _replace(graph: fx.Graph, cut: Cut, result: fx.Node) -> None:
    """Hand the exit's readers to `result`; erase the inside, last first, except what others still read.

    NOTE: an exit that writes in place (out.index_add_) is read through its target as well, and a write into
    a tensor that survives must survive with it: FX draws no edge for either.
    """
    flow = Dataflow(graph)
    last = flow.position[cut.exit]
    for target in flow.mutations.get(cut.exit, ()):
        for user in list(target.users):
            if flow.position[user] > last:
                user.replace_input_with(target, result)
    cut.exit.replace_all_uses_with(result)
    _erase_assertions(cut)
    for node in reversed(cut.nodes):
        if not node.users and (node is cut.exit or not _writes_for_survivors(flow, node)):
            graph.erase_node(node)


def _erase_assertions(cut: Cut) -> None:
    """Drop assertions about sizes inside the cut: they would keep alive what they read."""
    for node in cut.nodes:
        for user in list(node.users):
            if is_only_asserted(user):
                _erase_with_users(user)


def _erase_with_users(node: fx.Node) -> None:
    for user in list(node.users):
        _erase_with_users(user)
    node.graph.erase_node(node)


def _writes_for_survivors(flow: Dataflow, node: fx.Node) -> bool:
    """Whether something still in the graph reads, later, what `node` wrote in place."""
    readers = {
        user for target in flow.mutations.get(node, ()) for alias in flow.aliases(target) for user in alias.users
    }
    return any(flow.position[user] > flow.position[node] for user in readers)
