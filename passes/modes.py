"""Modes that edges do not show: gradient mode and autocast, at every node of a graph.

Entering and leaving them are nodes without data edges, so a region can straddle one unseen. `modes_at` replays
them in order; a body of a higher-order op starts in the modes of the node that calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.dynamo import mode_switch
from memfine_fx.passes.dataflow import target_name

__all__ = ["Modes", "called_bodies", "enter_autocast", "modes_at"]


@dataclass(frozen=True)
class Modes:
    """State beyond what was ambient when the graph was captured.

    Args:
        disables_grad: whether the graph has switched gradients off.
        autocast: arguments of the autocast contexts entered and not left, outermost first.
    """

    disables_grad: bool = False
    autocast: tuple[tuple[Any, ...], ...] = ()


def modes_at(graph: fx.Graph, start: Modes) -> dict[fx.Node, Modes]:
    """The modes under which each node runs."""
    modes = start
    entered: dict[fx.Node, tuple[Any, ...]] = {}
    result: dict[fx.Node, Modes] = {}
    for node in graph.nodes:
        switch = mode_switch(target_name(node)) if node.op == "call_function" else None
        if switch == "grad":
            modes = replace(modes, disables_grad=not node.args[0])
        elif switch == "enter autocast":
            entered[node] = tuple(node.args)
        elif switch == "exit autocast":
            entered.pop(node.args[0], None)
        modes = replace(modes, autocast=start.autocast + tuple(entered.values()))
        result[node] = modes
    return result


def called_bodies(graph_module: fx.GraphModule, start: Modes | None = None) -> Iterator[tuple[fx.GraphModule, Modes]]:
    """The graph and every higher-order-op body in it, each with the modes in which it starts."""
    start = start or Modes()
    yield graph_module, start
    at = modes_at(graph_module.graph, start)
    for node in graph_module.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        body = _submodule(graph_module, str(node.target))
        if body is not None:
            caller = next(iter(node.users), node)
            yield from called_bodies(body, at[caller])


def _submodule(graph_module: fx.GraphModule, path: str) -> fx.GraphModule | None:
    value: Any = graph_module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, fx.GraphModule) else None


@contextlib.contextmanager
def enter_autocast(modes: Modes) -> Iterator[None]:
    """Enter the autocast contexts of `modes`, on top of what is ambient."""
    with contextlib.ExitStack() as stack:
        for device_type, dtype, enabled, cache_enabled in modes.autocast:
            stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
        yield
