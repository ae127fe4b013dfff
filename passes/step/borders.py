"""Borders of layers: values that alone carry one layer into the next.

A partition that computes everything again needs them saved. The smallest cut between forward and backward is other
values of the same size, experts' outputs, from which the last layer's input is the sum of all layers' attentions:
backward would begin by computing all of these again, each alive until its layer's turn.

A border is a post-dominator: on every path from the first tokens to the last costly result (the head). What goes beside
it into all layers (masks, rotary embeddings, parameters) does not matter for that. Between one layer's experts and the
next layer's there may be two (before and behind attention); the first is taken. Before the first experts every second
one that several nodes read is, counted from these experts back: dense layers have two too.

Method: immediate dominators (Cooper, Harvey, Kennedy 2001) of the reversed graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import networkx as nx
import sympy
import torch
from torch import fx

import memfine_fx.runtime.head
import memfine_fx.runtime.op  # noqa: F401  # both register the ops
from memfine_fx.memory.sizes import size_expr

__all__ = ["layer_borders"]


def layer_borders(joint: fx.Graph, costly: Collection[str]) -> list[fx.Node]:
    """The borders of a joint graph's layers with chunked regions, in its order; none where several values are carried.

    Args:
        costly: names of forward's costly results.
    """
    order = {node: place for place, node in enumerate(joint.nodes)}
    experts = [node for node in order if node.target is torch.ops.memfine.experts.default]
    if not experts:
        return []
    heads = [node for node in order if node.name in costly or node.target is torch.ops.memfine.head_loss.default]
    end = heads[-1] if heads else experts[-1]
    backwards = _reversed_up_to(end)
    if experts[-1] not in backwards:  # it does not follow from them
        end = experts[-1]
        backwards = _reversed_up_to(end)
    first = _first_tokens(experts[0], [node for node in order if node in backwards])
    if first is None:
        return []
    stream, dominators = [first], nx.immediate_dominators(backwards, end)
    while dominators[stream[-1]] not in (end, None):
        stream.append(dominators[stream[-1]])
    before = [node for node in stream if order[node] < order[experts[0]] and backwards.in_degree(node) > 1]
    # Making the first tokens again costs nothing.
    borders = [node for node in before[:-1][::-2][::-1] if node is not first]
    for this, following in itertools.pairwise((*experts, end)):
        borders += [node for node in stream if order[this] < order[node] < order[following]][:1]
    return borders


def _reversed_up_to(end: fx.Node) -> nx.DiGraph[fx.Node]:
    """Return the graph of the nodes that `end` is computed from, with an edge from each node to its sources.

    A post-dominator of the original graph is a dominator of this one.
    """
    edges: nx.DiGraph[fx.Node] = nx.DiGraph()
    edges.add_node(end)
    pending = [end]
    while pending:
        node = pending.pop()
        for source in node.all_input_nodes:
            if source not in edges:
                pending.append(source)
            edges.add_edge(node, source)
    return edges


def _first_tokens(experts: fx.Node, candidates: list[fx.Node]) -> fx.Node | None:
    """The first of these nodes that has as many numbers as go through the experts."""
    wanted = _numel(experts.all_input_nodes[0])
    return next((node for node in candidates if wanted is not None and _numel(node) == wanted), None)


def _numel(node: fx.Node) -> sympy.Expr | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return sympy.expand(sympy.prod([size_expr(length) for length in value.shape]))
