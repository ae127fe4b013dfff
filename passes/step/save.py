"""Save: rewrite regions of a joint graph so that their forward saves rows for their backward.

Before:  out = memfine::experts(hidden, weight, order, offsets, params, region_id)
         grads = memfine::experts_backward(grad, hidden, ..., region_id, wanted)
After:   num_rows = memfine::num_saved_rows(order, region_id).item()
         out, *saved = memfine::experts_saving(hidden, ..., region_id, wanted, policy, num_rows)
         grads = memfine::experts_backward_saved(grad, hidden, ..., region_id, wanted, saved, policy)

The choice comes from the plan of the step. It is made on the joint graph, after differentiation, because only there
both ops are in sight, and differently for each layer. The partitioner saves these results and never recomputes them.
How many rows are saved is decided in each run, so that their number is a size which the graph reads of data, as that of
`torch.nonzero`'s result is; where rows come from other ranks all are saved.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

import memfine_fx.runtime.op  # noqa: F401  # registers the ops
from memfine_fx.compat.shapes import read_size
from memfine_fx.compat.tensors import FakeTensor, tree_map
from memfine_fx.passes.step.costly_results import must_save, size_hint
from memfine_fx.plan.problem import SavableRows
from memfine_fx.records import SavePolicy, SavingOp
from memfine_fx.runtime.routing import group_params
from memfine_fx.runtime.store import lookup

__all__ = ["save_all_rows", "save_choices", "save_in_regions", "saving_ops", "trace_saving"]

_POLICIES: tuple[SavePolicy, ...] = ("projections", "operands")
_POLICIES_OF_RANKS: tuple[SavePolicy, ...] = ("received", *_POLICIES)
_META_OF_ARGUMENTS = ("val", "tensor_meta", "eager_input_vals")
_aten = torch.ops.aten
_FORWARD, _BACKWARD = torch.ops.memfine.experts.default, torch.ops.memfine.experts_backward.default


def save_choices(joint: fx.Graph) -> list[SavableRows]:
    """The choices of every region with a backward, smaller ones first."""
    choices = []
    for forward, backward in _pairs(joint).values():
        region_id, wanted = backward.args[6], backward.args[7]
        region = lookup(region_id)
        flags = _flags(wanted, region.compiled_expert.param_kinds, region.num_experts)
        num_rows = size_hint(forward.args[2].meta["val"].shape[0])
        arrived, all_to_all_seconds = 0, 0.0
        is_divisible = region.decides_saved_rows
        if region.exchange is not None:
            arrived = _arriving_row_bytes(forward)
            all_to_all_seconds = arrived * num_rows / region.exchange.bandwidth
        row_bytes = 0
        for policy in _POLICIES if region.exchange is None else _POLICIES_OF_RANKS:
            functions = region.compiled_expert.saving(policy, flags)
            if functions is None:
                continue
            dtype = forward.args[0].meta["val"].dtype
            if region.kernels is not None and not region.kernels.can_save(functions.saved, dtype):
                continue
            if arrived + functions.row_bytes > row_bytes:
                row_bytes = arrived + functions.row_bytes
                flops = functions.flops_per_row * num_rows
                sizes = (row_bytes, functions.copied_row_bytes, num_rows, region.num_experts)
                choices.append(SavableRows(region_id, policy, *sizes, flops, all_to_all_seconds, is_divisible))
    return choices


def saving_ops(backward: fx.Graph) -> tuple[SavingOp, ...]:
    """Return a record for each region of a backward graph that reads saved tensors."""
    records = []
    for node in backward.nodes:
        if node.target is torch.ops.memfine.experts_backward_saved.default:
            region = lookup(node.args[6])
            flags = _flags(node.args[7], region.compiled_expert.param_kinds, region.num_experts)
            records.append(SavingOp(region.region_id, node.args[9], flags))
    return tuple(records)


def trace_saving(ops: Sequence[SavingOp]) -> None:
    """Have compiled functions traced that a graph from a cache will ask for: inside an operator that runs, functorch
    cannot.
    """
    for op in ops:
        lookup(op.region_id).compiled_expert.saving(op.policy, op.wanted)


def _arriving_row_bytes(forward: fx.Node) -> int:
    """Return the bytes of a row with its routing weight, as it comes from another rank."""
    hidden, weight = forward.args[:2]
    assert isinstance(hidden, fx.Node)
    rows = hidden.meta["val"]
    num_bytes = int(rows.shape[1]) * int(rows.dtype.itemsize)
    return num_bytes + (int(weight.meta["val"].dtype.itemsize) if isinstance(weight, fx.Node) else 0)


def save_in_regions(joint: fx.Graph, policies: Mapping[str, SavePolicy]) -> set[str]:
    """Rewrite the regions with these ids in place, and return the names of the nodes that hold their saved rows."""
    names: set[str] = set()
    for region_id, (forward, backward) in _pairs(joint).items():
        if policies.get(region_id, "nothing") != "nothing":
            names |= _rewrite(joint, forward, backward, policies[region_id])
    return names


def save_all_rows(graph_module: fx.GraphModule) -> None:
    """Let each run of a forward graph save all rows of its regions, also on fake tensors, of which no size is read."""
    graph = graph_module.graph
    for count in list(graph.find_nodes(op="call_function", target=torch.ops.memfine.num_saved_rows.default)):
        for number in list(count.users):
            with graph.inserting_before(number):
                number.replace_all_uses_with(graph.call_function(_aten.sym_size.int, (count.args[0], 0)))
            graph.erase_node(number)
        graph.erase_node(count)
    graph_module.recompile()


def _pairs(joint: fx.Graph) -> dict[str, tuple[Any, Any]]:
    """Site -> its forward and backward node, where there is one of each."""
    nodes_by_region_id: dict[str, list[fx.Node]] = {}
    for node in joint.nodes:
        if node.target is _FORWARD:
            nodes_by_region_id.setdefault(node.args[5], []).append(node)
        elif node.target is _BACKWARD:
            nodes_by_region_id.setdefault(node.args[6], []).append(node)
    pairs = {
        region_id: nodes
        for region_id, nodes in nodes_by_region_id.items()
        if [op_node.target for op_node in nodes] == [_FORWARD, _BACKWARD]
    }
    return {region_id: (nodes[0], nodes[1]) for region_id, nodes in pairs.items()}


def _flags(wanted: Any, kinds: Any, num_experts: int) -> tuple[bool, ...]:
    return (wanted[0], wanted[1], *map(any, group_params(wanted[2:], kinds, num_experts)))


def _rewrite(joint: fx.Graph, forward: fx.Node, backward: fx.Node, policy: SavePolicy) -> set[str]:
    region_id: Any = forward.args[5]
    with joint.inserting_before(forward):
        num_rows = _num_saved_rows if lookup(region_id).decides_saved_rows else _num_rows
        sizes = (backward.args[7], policy, num_rows(joint, forward))
        both = _call(joint, forward, torch.ops.memfine.experts_saving.default, *forward.args, *sizes)
        out, *saved = (_call(joint, forward, operator.getitem, both, place) for place in range(len(both.meta["val"])))
    must_save(both)
    with joint.inserting_before(backward):
        target = torch.ops.memfine.experts_backward_saved.default
        gradients = _call(joint, backward, target, *backward.args, saved, policy)
    forward.replace_all_uses_with(out)
    backward.replace_all_uses_with(gradients)
    joint.erase_node(forward)
    joint.erase_node(backward)
    return {node.name for node in saved}


def _num_rows(joint: fx.Graph, forward: fx.Node) -> Any:
    """Return N, a number or a node."""
    order: Any = forward.args[2]
    rows = order.meta["val"].shape[0]
    return _call(joint, forward, _aten.sym_size.int, order, 0) if isinstance(rows, torch.SymInt) else rows


def _num_saved_rows(joint: fx.Graph, forward: fx.Node) -> fx.Node:
    """Return a node for the number of saved rows, a size that only a run knows."""
    order, region_id = forward.args[2], forward.args[5]
    count = _call(joint, forward, torch.ops.memfine.num_saved_rows.default, order, region_id)
    number = read_size(joint, count)
    must_save(number)
    return number


def _call(joint: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call that stands where `like` does, with its fake result."""
    node = joint.call_function(target, args)
    node.meta.update({key: value for key, value in like.meta.items() if key not in _META_OF_ARGUMENTS})
    values = tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf, args)
    if target is operator.getitem:
        node.meta["val"] = values[0][values[1]]
        return node
    fake_mode = next(leaf for leaf in values if isinstance(leaf, FakeTensor)).fake_mode
    with fake_mode, torch.no_grad():
        node.meta["val"] = target(*values)
    return node
