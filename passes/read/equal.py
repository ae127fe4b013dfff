"""Equal layers are read once: where the graph repeats node by node, a region repeats too.

Dynamo writes each layer's code into the graph anew, so the nodes of an equal layer stand at the same distances from its
routing decision. If every node from the first that was read to the exit calls the same thing on the same operands, and
what comes from outside is of the same kind, then a second walk would do what the first did. What lies around the region
is not compared: whether it may be taken out is asked again (`removable`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from memfine_fx.memory.sizes import size_expr
from memfine_fx.passes.dataflow import Dataflow, is_float_tensor, is_only_asserted, node_value, provenance
from memfine_fx.passes.modes import Modes
from memfine_fx.passes.ops import name_of
from memfine_fx.passes.read.sinking import LOOKED_BEHIND
from memfine_fx.records import MoERegion

__all__ = ["repeated"]


def repeated(region: MoERegion, seed: fx.Node, flow: Dataflow, modes: dict[fx.Node, Modes]) -> MoERegion | None:
    """Return the region of a routing decision whose layer repeats that of a region that was read; None where it does
    not.
    """
    assert region.seed is not None, "a region that was read has a seed"
    read = [region.cut.exit, *region.cut.nodes, region.seed, *region.seed.all_input_nodes, region.first_matmul]
    index = [] if region.expert_index is None else [region.expert_index]
    if any(node not in flow.position for node in (*read, *index)):
        return None  # ids of a mask: they were put into the graph when the region was read
    places = [flow.position[node] for node in read]
    match = _Match(flow, modes)
    shift = flow.position[seed] - flow.position[region.seed]
    if not match.covers(range(min(places), max(places) + 1), shift):
        return None
    pairs = match.pairs
    wanted = (region.hidden, region.routing_weight, region.base, *region.params, *region.weight_columns, *index)
    if any(node is not None and node not in pairs for node in wanted):
        return None
    return _moved(region, pairs)


def _moved(region: MoERegion, pairs: dict[fx.Node, fx.Node]) -> MoERegion:
    """The region with each node replaced by its pair."""

    def of(node: fx.Node | None) -> fx.Node | None:
        return None if node is None else pairs[node]

    def all_of(nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        return tuple(pairs[node] for node in nodes)

    cut = region.cut
    return replace(
        region,
        cut=replace(
            cut, expert_index=of(cut.expert_index), exit=pairs[cut.exit], nodes=all_of(cut.nodes),
            inputs=all_of(cut.inputs),
        ),
        hidden=pairs[region.hidden],
        expert_index=of(region.expert_index),
        routing_weight=of(region.routing_weight),
        params=all_of(region.params),
        first_matmul=pairs[region.first_matmul],
        where=provenance(pairs[region.first_matmul]),
        base=of(region.base),
        weight_columns=all_of(region.weight_columns),
        stops=all_of(region.stops),
    )  # fmt: skip


class _Match:
    """Pairs of nodes that do the same, one of each in two stretches of a graph; no node has two partners."""

    def __init__(self, flow: Dataflow, modes: dict[fx.Node, Modes]) -> None:
        self.pairs: dict[fx.Node, fx.Node] = {}
        self._partners: dict[fx.Node, fx.Node] = {}
        self._modes = modes
        self._nodes = sorted(flow.position, key=flow.position.__getitem__)

    def covers(self, places: range, shift: int) -> bool:
        """Whether each node at `places` repeats `shift` places later."""
        if places[-1] + shift >= len(self._nodes):
            return False
        # Along the graph by induction: the same calls on operands that are pairs give results that are pairs.
        stretch = [(self._nodes[place], self._nodes[place + shift]) for place in places]
        for node, other in stretch:
            if not self._pair(node, other):
                return False
        inner = {inner_node for inner_node, _ in stretch}
        return all(self._repeats(inner_node, other, inner) for inner_node, other in stretch)

    def _pair(self, one: fx.Node, other: fx.Node) -> bool:
        # Both ways: else a layer that reads one tensor twice would pass for one that reads two.
        return self.pairs.setdefault(one, other) is other and self._partners.setdefault(other, one) is one

    def _repeats(self, one: fx.Node, other: fx.Node, inner: set[fx.Node]) -> bool:
        """Whether two nodes call the same, on operands that are pairs."""
        if one.op != other.op or one.target != other.target or self._modes[one] != self._modes[other]:
            return False
        mine, its = one.all_input_nodes, other.all_input_nodes
        is_assertion = not one.users and is_only_asserted(
            one
        )  # its text names symbols, which each layer has of its own
        if len(mine) != len(its) or not (is_assertion or _same_constants(one, other)):
            return False
        for a, b in zip(mine, its, strict=True):
            if a not in self.pairs and not _alike(a, b):
                return False
            if not self._pair(a, b):
                return False
        return True


def _same_constants(one: fx.Node, other: fx.Node) -> bool:
    """Whether two calls' arguments are the same but for the nodes in them."""

    def blank(node: fx.Node) -> str:
        return _NODE

    return bool(fx.map_arg((one.args, one.kwargs), blank) == fx.map_arg((other.args, other.kwargs), blank))


_NODE = "a node"


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes from outside are of one kind, and made alike as far as reading looks behind a leaf.

    It looks behind views, parts, copies and factories, and at whatever integers are made of; what computed a tensor of
    floats is of no interest to it.
    """
    if one is other or _kind_of(one) != _kind_of(other):
        return one is other
    if is_float_tensor(one) and not ({name_of(one), name_of(other)} & LOOKED_BEHIND):
        return True
    sources, others = one.all_input_nodes, other.all_input_nodes
    is_same_call = one.op == other.op and (one.op in ("placeholder", "get_attr") or one.target == other.target)
    return (
        is_same_call
        and len(sources) == len(others)
        and _same_constants(one, other)
        and all(_alike(a, b) for a, b in zip(sources, others, strict=True))
    )


def _kind_of(node: fx.Node) -> object:
    value = node_value(node)
    if not isinstance(value, torch.Tensor):
        return type(value), str(value)
    sizes, strides = map(size_expr, value.shape), map(size_expr, value.stride())
    return type(value), tuple(sizes), tuple(strides), value.dtype, value.device, value.requires_grad, value.is_leaf
