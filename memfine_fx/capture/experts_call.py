"""Calls of transformers' experts function "memfine" inside of graphs that Dynamo captures.

Dynamo puts the whole call into its graph as one node. What runs in that node is the chunked form of the layer, so that
any backend trains in chunks. Our pass reads the layer as it was traced, which `inline_calls` puts in front of the node;
`restore_calls` puts the node back where the layer was not chunked in its graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from memfine_fx.compat.tensors import FakeTensor
from memfine_fx.passes.dataflow import node_value

__all__ = ["TracedExperts", "call_traced", "inline_calls", "register_traced", "restore_calls"]

_INLINED = "memfine_inlined"
"""Key of a call's metadata: the nodes in front of it that compute the same, its result last."""


@dataclass(frozen=True, eq=False)
class TracedExperts:
    """A kind of experts layer.

    Args:
        graph: (tensors of the layer, hidden [T,H], index [T,K], weight [T,K]) -> [T,H], as traced.
        run: the same in chunks.
    """

    graph: fx.Graph
    run: Callable[..., Tensor]


_traced: weakref.WeakValueDictionary[str, TracedExperts] = weakref.WeakValueDictionary()


def register_traced(name: str, traced: TracedExperts) -> None:
    """Make a kind of layer callable by a name, for as long as it lives: compiled code holds the name."""
    _traced[name] = traced


def call_traced(name: str, *args: Tensor) -> Tensor:
    """Return the combined outputs [T,H] of a layer of a registered kind, in chunks."""
    return _traced[name].run(*args)


torch.compiler.allow_in_graph(call_traced)  # type: ignore[no-untyped-call]


def inline_calls(graph_module: fx.GraphModule) -> None:
    """Let what reads a `call_traced` of a captured graph read the nodes of the layer as it was traced."""
    calls = graph_module.graph.find_nodes(op="call_function", target=call_traced)
    for call in calls:
        _inline(graph_module.graph, call)
    if calls:
        graph_module.recompile()


def restore_calls(graph_module: fx.GraphModule) -> None:
    """Undo `inline_calls` for layers whose nodes are still read, and erase the calls of the others."""
    graph = graph_module.graph
    calls = graph.find_nodes(op="call_function", target=call_traced)
    left = set(graph.nodes) if calls else set()
    for call in calls:
        *_, output = inlined = call.meta.pop(_INLINED)
        if output not in left or not output.users:
            graph.erase_node(call)
            continue
        output.replace_all_uses_with(call)
        for node in reversed(inlined):
            graph.erase_node(node)
    if calls:
        graph.lint()
        graph_module.recompile()


def _inline(graph: fx.Graph, call: fx.Node) -> None:
    name, *args = call.args
    mode = next(value.fake_mode for node in call.all_input_nodes if isinstance(value := node_value(node), FakeTensor))
    traced = _traced[str(name)].graph
    copies: dict[fx.Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), args, strict=True))
    inlined: list[fx.Node] = []
    with graph.inserting_before(call), mode, torch.enable_grad():
        for node in traced.nodes:
            if node.op == "call_function":
                copy = copies[node] = graph.node_copy(node, copies.__getitem__)
                operands: Any = fx.map_arg((copy.args, copy.kwargs), node_value)  # type: ignore[arg-type]  # values, no nodes
                result = copy.target(*operands[0], **operands[1])  # type: ignore[operator]  # a call_function
                copy.meta = {**call.meta, "stack_trace": node.meta["stack_trace"], "example_value": result}
                inlined.append(copy)
    call.replace_all_uses_with(inlined[-1])
    call.meta[_INLINED] = inlined
