"""Roll a list of experts over slots: expert 0 on the slots of all experts at once.

The copies are unified as in routed loops (`unify`); what is left is retraced with the whole buffer in place of expert
0's part, and then proved row-wise like any other rows in slots.

Refuses: copies that differ; weights that are entries of a table (which a batched matmul would read).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memfine_fx.compat.autograd import enable_python_dispatcher
from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import node_value
from memfine_fx.passes.loops.roll import Rolled, RolledParam
from memfine_fx.passes.loops.slot_lists import SlotList
from memfine_fx.passes.loops.unify import unify
from memfine_fx.passes.loops.values import Copy, Entry, Loop
from memfine_fx.passes.modes import Modes, enter_autocast
from memfine_fx.passes.normalize import NormalizedRegion, fake_mode_of

__all__ = ["roll_slot_list"]

aten = torch.ops.aten


def roll_slot_list(region: NormalizedRegion, found: SlotList, modes: Modes) -> Rolled:
    """Expert 0 on all slots.

    Args:
        region: the list's cut as functional ATen.
        found: the list.
        modes: under which it runs.

    Raises:
        CannotChunk: see the module docstring.
    """
    graph = region.graph_module.graph
    outer = dict(zip((node for node in graph.nodes if node.op == "placeholder"), region.inputs, strict=True))
    buffer = next(node for node, source in outer.items() if source is found.rows)
    loop = Loop(buffer, 1, is_distinct=True)
    for node in graph.nodes:
        expert = _expert_of(node, buffer)
        if expert is not None:
            loop.values[node] = Entry(expert, "slots", buffer)
    results = _put_together(next(iter(reversed(graph.nodes))).args[0])
    copies: list[Copy] = [(expert, None) for expert in range(len(results))]
    slots = unify(loop, copies, results, lambda a, b: outer[a] is outer[b])
    if any(slot.kind == "expert" for slot in slots):
        raise CannotChunk("experts in a list read entries of one table", found.cut.exit)
    params = {outer[slot.node]: RolledParam(slot.kind, tuple(map(outer.__getitem__, slot.tensors))) for slot in slots}
    return Rolled(_first_on_all(found, modes), params, len(results))


def _expert_of(node: fx.Node, buffer: fx.Node) -> int | None:
    """Which expert's part of the buffer an ATen node is."""
    if node.target is aten.select.int and node.args[0] is buffer:
        return node.args[2] if isinstance(node.args[2], int) else None
    source = node.args[0] if node.target is operator.getitem else None
    is_part = isinstance(source, fx.Node) and bool(source.args) and source.args[0] is buffer
    return node.args[1] if is_part and isinstance(node.args[1], int) else None


def _put_together(output: Any) -> list[fx.Node]:
    if output.target not in (aten.cat.default, aten.stack.default):
        raise CannotChunk("the experts' results are not put together in one tensor", output)
    results = list(output.args[0])
    is_unsqueezed = output.target is aten.cat.default and all(one.target is aten.unsqueeze.default for one in results)
    return [one.args[0] for one in results] if is_unsqueezed and _stacks(output) else results


def _stacks(output: fx.Node) -> bool:
    """Whether a concatenation of unsqueezed tensors is what became of a stack."""
    value, own = node_value(output), node_value(output.args[0][0].args[0])  # type: ignore[arg-type, index, union-attr]
    return isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor) and value.ndim == own.ndim + 1


def _first_on_all(found: SlotList, modes: Modes) -> NormalizedRegion:
    """The region with expert 0 on the slots of all experts, [E*C,H]."""
    part, result = found.first
    nodes = _between(found, part, result)
    inside = {*nodes, part}
    inputs = [found.rows]
    inputs += dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    values = [node_value(node) for node in inputs]
    fake_mode = fake_mode_of(values)
    assert fake_mode is not None, "regions are traced on fake tensors"

    def body(*args: Any) -> torch.Tensor:
        env = dict(zip(inputs, args, strict=True))
        moved = args[0].movedim(found.dim, 0)
        env[part] = moved.flatten(0, 1).unsqueeze(found.dim) if found.keeps_dim else moved.flatten(0, 1)
        for node in nodes:
            env[node] = _run(node, env)
        out = env[result].squeeze(found.dim) if found.keeps_dim else env[result]
        unflattened: torch.Tensor = out.unflatten(0, (moved.shape[0], moved.shape[1])).movedim(0, found.dim)
        return unflattened

    try:
        with torch.no_grad(), enable_python_dispatcher(), fake_mode, enter_autocast(modes):
            traced = make_fx(torch.func.functionalize(body, remove="mutations"), tracing_mode="real")(*values)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise CannotChunk(f"retracing an expert of the list failed: {error}", found.cut.exit) from error
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return NormalizedRegion(traced, tuple(inputs))


def _between(found: SlotList, part: fx.Node, result: fx.Node) -> list[fx.Node]:
    """The cut's nodes that the result needs, from the part on, in order."""
    needed, pending = {result}, [result]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source is not part and source in found.cut.nodes and source not in needed:
                needed.add(source)
                pending.append(source)
    return [node for node in found.cut.nodes if node in needed]


def _run(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op != "call_function" or not callable(node.target):
        raise CannotChunk(f"an expert of the list holds a {node.op} node", node)
    return node.target(*args, **kwargs)
