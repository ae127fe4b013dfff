"""Replay: routers whose choices come from outside, in graphs that are compiled for it.

Before:  weights, ids = topk(scores, K)
After:   _, own = topk(scores, K);  ids = memfine::replayed_ids(own, ...);  weights = gather(scores, ids)

Weights are still the trained router's, and so are their gradients: those of a gather are those of a top-k that chose
the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

import memfine_fx.runtime.routing_hooks  # noqa: F401  # registers the op
from memfine_fx.errors import RoutingReplayError
from memfine_fx.passes.dataflow import is_int_tensor, tensor_of
from memfine_fx.passes.lower.region import Call, recording
from memfine_fx.passes.ops import CASTS, CHOOSERS, LAYOUTS, LIKE_FACTORIES, MATMULS, SORTS, name_of
from memfine_fx.passes.read.seeds import GLUE, is_along_last, is_chosen, is_looked_up
from memfine_fx.records import MoERegion

__all__ = ["choices_of", "replay_choices"]


def choices_of(region: MoERegion) -> list[fx.Node]:
    """Return the choices that give a region its ids, in the order of a token's experts; before it is lowered.

    Raises:
        RoutingReplayError: no choice gives them, or the weights are not those of the chosen experts.
    """
    top_k = region.dims.top_k
    choices = [] if region.expert_index is None else _choices(region.expert_index, region.dims.num_experts)
    widths = [_num_choices(choice, top_k) for choice in choices]
    other = _other_chooser(_weights_of(region), [_chooser(choice) for choice in choices], region.dims.num_experts)
    why = ""
    if region.expert_index is None:
        why = "experts choose tokens"
    elif widths not in ([top_k], [1] * top_k):
        why = "its ids are computed of what the router chooses"
    elif other is not None:
        why = f"its weights are the largest scores, which another {name_of(other)} finds"
    if why:
        raise RoutingReplayError(f"the routing of {region.where} cannot be replayed: {why}")
    return choices


def replay_choices(region: MoERegion, choices: Sequence[fx.Node], region_id: str, parameter: fx.Node | None) -> None:
    """Let the ids of a lowered region come from `memfine::replayed_ids`; the caller recompiles the graph.

    Args:
        choices: from `choices_of`.
        parameter: see `runtime.routing_replay.key_of`.
    """
    num_experts, top_k = region.dims.num_experts, region.dims.top_k
    for first, choice in enumerate(choices):
        _replace(choice, parameter, (region_id, num_experts, first, _num_choices(choice, top_k), top_k))


def _weights_of(region: MoERegion) -> list[fx.Node]:
    """Return routing weights of a region, and what its unweighted result is multiplied by."""
    weights = [node for node in (region.routing_weight, *region.weight_columns) if node is not None]
    pending = [] if weights else [region.cut.exit]
    while pending:
        node = pending.pop()
        for user in node.users:
            if name_of(user) in GLUE | CASTS | {"mul"}:
                pending.append(user)
                weights += [source for source in user.all_input_nodes if source is not node]
    return weights


def _choices(index: fx.Node, num_experts: int) -> list[fx.Node]:
    """Return the choices that an index is made of, in the order of a token's experts; [] where they are none.

    A lookup of tokens' experts counts as a choice. Scores may be of more than E experts: those that do nothing count.
    Between a choice and the index ids stay as they are, but for those of dropped choices, which leave the range: else a
    recorded id would be another than the choice.
    """
    name, args = name_of(index), index.args
    if is_looked_up(index):
        return [index]
    if is_chosen(index):
        is_of_experts = is_along_last(index) and tensor_of(_scores(index)).shape[-1] >= num_experts
        return [index] if is_of_experts else []
    if index.target is torch.ops.memfine.ids_of_mask.default:
        return _choices_of_mask(index.all_input_nodes[0], num_experts)
    if name in ("cat", "stack") and isinstance(args[0], (tuple, list)):
        parts = [_choices(part, num_experts) for part in args[0] if isinstance(part, fx.Node)]
        return [choice for part in parts for choice in part] if all(parts) else []
    if name == "where" and len(args) == 3:
        numbers = [value for value in args[1:] if isinstance(value, int)]
        sources = [value for value in args[1:] if isinstance(value, fx.Node)]
        is_dropped = len(sources) == 1 and all(not 0 <= number < num_experts for number in numbers)
        return _choices(sources[0], num_experts) if is_dropped else []
    is_glue = name in GLUE and is_int_tensor(index) and isinstance(args[0], fx.Node)
    return _choices(args[0], num_experts) if is_glue else []  # type: ignore[arg-type]  # a node


def _choices_of_mask(mask: fx.Node, num_experts: int) -> list[fx.Node]:
    """Return the choices of whose one-hot encoding a mask is a part."""
    name = name_of(mask)
    if name == "one_hot":
        return _choices(mask.all_input_nodes[0], num_experts)
    if name in GLUE | CASTS | {"mul", "bitwise_and", "logical_and"}:
        factors = (_choices_of_mask(source, num_experts) for source in mask.all_input_nodes)
        return next((choices for choices in factors if choices), [])
    return []


def _other_chooser(weights: Sequence[fx.Node], replaced: Sequence[fx.Node], num_experts: int) -> fx.Node | None:
    """Return a call, other than the replaced ones, whose largest scores routing weights are made of; None without one.

    Looked for from the weights back to the router's matmul, through values and masks. Choices among groups of experts
    may mask scores.
    """
    visited: set[fx.Node] = set()
    pending = list(weights)
    while pending:
        node = pending.pop()
        name = name_of(node)
        if node in visited or name in MATMULS | LIKE_FACTORIES:
            continue
        visited.add(node)
        if name in CHOOSERS | SORTS | {"amax", "kthvalue"} and node not in replaced:
            if tensor_of(node.all_input_nodes[0]).shape[-1] >= num_experts:
                return node
            continue
        sources = node.all_input_nodes[:1] if name in CASTS | LAYOUTS else node.all_input_nodes
        pending += [source for source in sources if not is_int_tensor(source)]
    return None


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


def _replace(choice: fx.Node, parameter: fx.Node | None, of_layer: tuple[str, int, int, int, int]) -> None:
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
