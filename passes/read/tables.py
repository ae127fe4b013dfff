"""Tables whose experts do not come first: two views are put into the graph, so that every table is [E,...].

    product = einsum("ore,eri->eoi", B, A)      first = movedim(B, 2, 0)               the region's input, a table
                                                back = movedim(first, 0, 2)            inside the region
                                                product = einsum("ore,eri->eoi", back, A)

    table = dequantize(packed, scales)          first = reshape(packed, (E, -1))
                                                back = reshape(first, packed.shape)

The runtime takes an expert's entry of a table along its first dimension; gradients go through the view into B.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.tensors import FakeTensor
from memfine_fx.passes.dataflow import tensor_of
from memfine_fx.passes.read.expressions import FLAT
from memfine_fx.records import Cut, MoERegion

__all__ = ["move_tables", "restore_tables"]

_BACK = "memfine_moved_back"


def move_tables(region: MoERegion) -> MoERegion:
    """The region with experts first in every table; changes its graph, see above, where one has them elsewhere."""
    for place, dim in enumerate(region.expert_dims):
        if dim:
            region = _with_first(region, place, dim)
    return replace(region, expert_dims=())


def restore_tables(graph_module: fx.GraphModule) -> None:
    """Take out the views of regions that were not lowered, and those that nothing reads any more."""
    backs = [node for node in graph_module.graph.nodes if _BACK in node.meta]
    for back in backs:
        first = back.args[0]
        back.replace_all_uses_with(first.args[0])
        graph_module.graph.erase_node(back)
        if not first.users:
            graph_module.graph.erase_node(first)
    if backs:
        graph_module.recompile()


def _with_first(region: MoERegion, place: int, dim: int) -> MoERegion:
    table, cut = region.params[place], region.cut
    readers = [node for node in cut.nodes if table in node.all_input_nodes]
    with table.graph.inserting_before(readers[0]):
        if dim == FLAT:
            first = _view(table, torch.reshape, (region.dims.num_experts, -1))
            back = _view(first, torch.reshape, tuple(map(int, tensor_of(table).shape)))
        else:
            first = _view(table, torch.movedim, dim, 0)
            back = _view(first, torch.movedim, 0, dim)
    back.meta[_BACK] = True
    for node in readers:
        node.replace_input_with(table, back)
    params = tuple(first if other == place else node for other, node in enumerate(region.params))
    return replace(region, params=params, cut=_with_back(cut, readers[0], first, back))


def _view(source: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A view's node, with its fake value: trained where the source is, whatever mode the compiler is in."""
    value = tensor_of(source)
    assert isinstance(value, FakeTensor)
    node = source.graph.call_function(target, (source, *args))
    node.meta.update(
        {key: meta_value for key, meta_value in source.meta.items() if key not in ("example_value", "val")}
    )
    with value.fake_mode, torch.enable_grad():
        node.meta["example_value"] = target(value, *args)
    return node


def _with_back(cut: Cut, reader: fx.Node, first: fx.Node, back: fx.Node) -> Cut:
    at = cut.nodes.index(reader)
    nodes = (*cut.nodes[:at], back, *cut.nodes[at:])
    inside = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    assert first in inputs
    return replace(cut, nodes=nodes, inputs=tuple(inputs))
