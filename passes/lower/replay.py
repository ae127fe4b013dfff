"""Replay: routers whose choices come from outside, in graphs that are compiled for it.

Before:  weights, ids = topk(scores, K)
After:   _, own = topk(scores, K);  ids = memfine::replayed_ids(own, ...);  weights = gather(scores, ids)

Weights are still the trained router's, and so are their gradients: those of a gather are those of a top-k that chose
the same. A choice is looked for behind the index of a lowered region, through integers only; `runtime.routing_replay`
compares what the layer runs with with what was handed out, whatever lies between.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import memfine_fx.runtime.routing_replay  # noqa: F401  # registers the op
from memfine_fx.errors import RoutingReplayError
from memfine_fx.passes.dataflow import is_int_tensor, node_value, tensor_of
from memfine_fx.passes.lower.region import Call, recording
from memfine_fx.passes.ops import name_of
from memfine_fx.passes.read.seeds import is_along_last, is_chosen, is_looked_up
from memfine_fx.records import MoERegion

__all__ = ["replay_choices"]


def replay_choices(region: MoERegion, region_id: str, parameter: fx.Node | None) -> None:
    """Let the ids of a lowered region come from `memfine::replayed_ids`; the caller recompiles the graph.

    Args:
        parameter: see `runtime.routing_replay.key_of`.

    Raises:
        RoutingReplayError: no choice of the graph gives these ids.
    """
    num_experts, top_k = region.dims.num_experts, region.dims.top_k
    choices = [] if region.expert_index is None else _choices(region.expert_index, num_experts)
    widths = [_num_choices(choice, top_k) for choice in choices]
    if widths not in ([top_k], [1] * top_k):
        what = "experts choose tokens" if region.expert_index is None else f"{len(choices)} choices lead to its ids"
        raise RoutingReplayError(f"the routing of {region.where} cannot be replayed: {what}")
    for first, choice in enumerate(choices):
        _replace(choice, parameter, (region_id, num_experts, first, top_k))


def _choices(index: fx.Node, num_experts: int) -> list[fx.Node]:
    """Return the integers of choices among experts that an index is computed of, in the order of its operands.

    A lookup of tokens' experts counts as one. Scores may be of more than E experts: those that do nothing count too.
    """
    choices: list[fx.Node] = []
    seen: set[fx.Node] = set()

    def visit(node: fx.Node) -> None:
        if node in seen:
            return
        seen.add(node)
        if is_looked_up(node) or is_chosen(node):
            scores = None if is_looked_up(node) else _scores(node)
            if scores is None or (is_along_last(node) and tensor_of(scores).shape[-1] >= num_experts):
                choices.append(node)
            return
        for source in node.all_input_nodes:
            value = node_value(source)
            is_mask = isinstance(value, torch.Tensor) and value.dtype is torch.bool
            if is_int_tensor(source) or is_mask or isinstance(value, (tuple, list)):
                visit(source)

    visit(index)
    return choices


def _chooser(choice: fx.Node) -> fx.Node:
    """Return the call that chooses: what gives values and integers, or the integers alone."""
    source = choice.args[0]
    return source if isinstance(source, fx.Node) and is_chosen(choice) and name_of(choice) == "getitem" else choice


def _scores(choice: fx.Node) -> fx.Node:
    scores = _chooser(choice).args[0]
    assert isinstance(scores, fx.Node)
    return scores


def _num_choices(choice: fx.Node, top_k: int) -> int:
    value = tensor_of(choice)
    if is_looked_up(choice):
        return top_k if value.shape[-1] == top_k else 1
    return int(value.shape[-1]) if value.ndim == tensor_of(_scores(choice)).ndim else 1


def _replace(choice: fx.Node, parameter: fx.Node | None, of_layer: tuple[str, int, int, int]) -> None:
    chooser = _chooser(choice)
    readers = list(chooser.users)
    with recording(choice.graph, chooser.next) as call:
        own = choice if choice is chooser else call(operator.getitem, chooser, 1)
        detached = None if parameter is None else call(torch.Tensor.detach, parameter)
        ids = call(torch.ops.memfine.replayed_ids.default, own, detached, *of_layer)
        for reader in readers:
            if choice is chooser:
                reader.replace_input_with(choice, ids)
            elif name_of(reader) == "getitem":
                reader.replace_all_uses_with(ids if reader.args[1] == 1 else _values(call, _scores(choice), ids))
                choice.graph.erase_node(reader)


def _values(call: Call, scores: fx.Node, ids: fx.Node) -> fx.Node:
    """Return the scores of experts, in the shape of the ids."""
    if tensor_of(ids).ndim == tensor_of(scores).ndim:
        return call(torch.gather, scores, -1, ids)
    return call(torch.squeeze, call(torch.gather, scores, -1, call(torch.unsqueeze, ids, -1)), -1)
