"""Outline: the inside of a region as a graph of its own, to be run beside what replaces it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import node_value, written_node
from memfine_fx.records import Cut

__all__ = ["outline", "outline_with_map"]


def outline(cut: Cut, *, specializes_floats: bool) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The inside of a cut as a graph of its own, and the outer nodes behind its placeholders.

    Args:
        cut: what to copy.
        specializes_floats: turn symbolic floats into numbers (the capture's guards keep that sound).

    Raises:
        CannotChunk: an input has no recorded value, or the inside holds something that is not a call.
    """
    outlined, env = outline_with_map(cut, specializes_floats=specializes_floats)
    return outlined, [node for node in cut.inputs if isinstance(env[node], fx.Node)]


def outline_with_map(cut: Cut, *, specializes_floats: bool) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
    """As `outline`; also what became of each node: its copy, or the number it was specialised to."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in cut.inputs:
        value = node_value(node)
        if specializes_floats and isinstance(value, (torch.SymFloat, float)):
            env[node] = float(value)
        elif isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, int, float)):
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
    """What calls a body that was captured whole: an autograd.Function, a checkpoint, a branch, a loop."""
    names = [str(getattr(user.target, "_name", user.target)) for user in body.users]
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) or body.name
