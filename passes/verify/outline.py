"""Outline: the inside of a region as a graph of its own, to be run beside what replaces it."""

from __future__ import annotations

import torch
from torch import fx

from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import node_value, written_node
from memfine_fx.records import Cut

__all__ = ["outline"]


def outline(cut: Cut) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """The inside of a cut as a graph of its own, whose placeholders stand for the cut's inputs; each node's copy.

    Raises:
        CannotChunk: an input has no recorded value, or the inside holds something that is not a call.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in cut.inputs:
        value = node_value(node)
        if isinstance(value, (torch.Tensor, torch.Size, torch.SymInt, torch.SymFloat, int, float)):
            env[node] = graph.placeholder(node.name)
        elif value is None and node.op == "get_attr":
            raise CannotChunk(
                Reason.OPAQUE, f"a function that was captured whole ({_caller(node)}) stands among the experts", node
            )
        else:
            raise CannotChunk(
                Reason.UNREADABLE,
                f"input of the region has no recorded tensor or size, but {type(value).__name__}",
                node,
            )
    for node in cut.nodes:
        if node.op not in ("call_function", "call_method"):
            raise CannotChunk(Reason.OPAQUE, f"the region holds a {node.op} node", node)
        copied = graph.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, env.__getitem__),
            fx.map_arg(node.kwargs, env.__getitem__),
        )
        env[node] = copied
    graph.output(env[written_node(cut.exit)])
    return fx.GraphModule(torch.nn.Module(), graph), env


def _caller(body: fx.Node) -> str:
    """Return the names of what calls a body that was captured whole.

    The caller is an autograd.Function, a checkpoint, a branch or a loop.
    """
    names = [str(getattr(user.target, "_name", user.target)) for user in body.users]
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) or body.name
