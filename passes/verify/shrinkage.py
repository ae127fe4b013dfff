"""Shrinkage: a graph whose widths are numbers, as the same graph in narrow.

Dynamo writes a model's widths (H, F, 2F) into views, splits and slices as numbers, so a captured region runs at these
widths only. Where one factor divides all of them, every such number can be divided by it: sums and halves of widths
stay sums and halves. Whether the narrow graph means the same is not proved here; who runs it asks that it gives what
another narrow form of the same computation gives.

Refused: widths without a common factor, and widths that may be confused with counts (experts, choices, tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

__all__ = ["narrow_graph", "narrow_widths"]

_LEAST_WIDTH = 32
"""Numbers below it are ranks of adapters, heads, dimensions: they stay."""


def narrow_widths(widths: Iterable[int], counts: Iterable[int]) -> dict[int, int]:
    """Return what each width becomes, divided by a common factor; empty where they cannot be divided.

    Args:
        widths: every size of a tensor's inner dimensions.
        counts: numbers that stay: E, K, and T where it is a number.
    """
    wide = {width for width in widths if width >= _LEAST_WIDTH}
    factor = math.gcd(*wide)
    if factor < 2 or min(wide) <= max(counts, default=0):
        return {}
    while factor % 2 == 0 and min(wide) // factor < 2:  # a width of one would hide what a layout does
        factor //= 2
    return {width: width // factor for width in wide} if factor > 1 else {}


def narrow_graph(graph_module: fx.GraphModule, widths: Mapping[int, int]) -> fx.GraphModule:
    """A copy with every number that is a width replaced by its narrow one."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))

    def narrowed(value: Any) -> Any:
        return widths.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, narrowed)
        node.kwargs = fx.node.map_aggregate(node.kwargs, narrowed)
    return fx.GraphModule(graph_module, graph)
