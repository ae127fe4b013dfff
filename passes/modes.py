"""Modes that edges do not show: gradient mode and autocast, at every node of a graph.

Entering and leaving them are nodes without data edges, so a region can straddle one unseen. `modes_at` replays
them in order; a body of a higher-order op starts in the modes of the node that calls it. A node that lets no gradient
through has its edge all the same; `gradient_stop` reads that from the values that Dynamo recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.dynamo import mode_switch
from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.passes.dataflow import Dataflow, node_value
from memfine_fx.passes.ops import LIKE_FACTORIES, name_of, target_name
from memfine_fx.records import Modes

__all__ = ["Modes", "called_bodies", "enter_autocast", "gradient_stop", "modes_at"]


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


def gradient_stop(nodes: Iterable[fx.Node], flow: Dataflow) -> fx.Node | None:
    """The first node, in graph order, that takes floats which want a gradient and gives none that does.

    NOTE: read from Dynamo's own graph, whose values were computed under autograd. In a retrace the names of such nodes
    depend on torch's version: `make_fx` of 2.15 records a `detach` as `aten.alias`, which stops nothing.
    """
    written = {flow.root(target) for targets in flow.mutations.values() for target in targets}
    now: dict[fx.Node, bool] = {}  # a value that is written in place was recorded as it ended

    def wants(node: fx.Node) -> bool:
        root = flow.root(node)
        return now.setdefault(root, any(map(wants, root.all_input_nodes))) if root in written else _wants(node)

    for node in nodes:
        is_fed = name_of(node) not in LIKE_FACTORIES and any(
            _is_float(operand) and wants(operand) for operand in node.all_input_nodes
        )
        if is_fed and _is_float(node) and not _wants(node):
            return node
        if flow.root(node) in written:
            now[flow.root(node)] = is_fed or now.get(flow.root(node), False)
    return None


def _is_float(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in _leaves(node))


def _wants(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in _leaves(node))


def _leaves(node: fx.Node) -> list[Any]:
    return tree_leaves(node_value(node))


@contextlib.contextmanager
def enter_autocast(modes: Modes) -> Iterator[None]:
    """Enter the autocast contexts of `modes`, on top of what is ambient."""
    with contextlib.ExitStack() as stack:
        for device_type, dtype, enabled, cache_enabled in modes.autocast:
            stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
        yield
