"""Lower a head: replace projection and loss by one call of the chunked op.

Before:  logits = linear(hidden, weight, bias);  ...;  exit = cross_entropy(logits', labels, ...)
After:   tokens = reshape(hidden', (-1, H))              (hidden' after what happened to the tokens of the logits)
         exit = memfine::head_loss(tokens, weight, bias, labels, divisor, wanted, saves_logits, region_id)[0]

Under autocast hidden, weight and bias are cast before the call, as autocast would. Results of the graph that were
logits become None, or the op's last result, which has no gradient (`take_apart` gives it one); what asked logits for
their sizes asks a view of the hidden states that has these sizes.

The gradient of returned logits is taken beside the compiled graph, so that it has no tangent [T,V] of zeros.

Before:  logits = linear(hidden, weight, bias);  ...;  return loss, logits
After:   logits = linear(hidden, weight, bias);  ...;  return loss, logits.detach(), hidden
         and outside of the graph an autograd node from hidden, weight and bias to logits (`runtime.returned`)

A compiled graph is one autograd node, and what gradients do not come for is given to it as zeros: a tensor of the
logits' size where a caller uses only the loss, which is what nearly every caller does. A tangent of hidden is V / H
times smaller. Who differentiates the logits gets the same gradients by one more product for each operand. Only logits
of which every reader is known (`head.find`), returned as the projection made them or cast, are taken apart.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

import memfine_fx.runtime.head  # noqa: F401  # registers the op
from memfine_fx.config import Config
from memfine_fx.passes.dataflow import is_only_asserted, tensor_of
from memfine_fx.passes.head.find import as_made, find_heads, reads_sizes
from memfine_fx.passes.lower.region import Call, erase_with_users, recording
from memfine_fx.passes.ops import target_name
from memfine_fx.records import Refusal
from memfine_fx.records.heads import HeadRegion, ReturnedLogits

__all__ = ["lower_head", "take_apart"]


def lower_head(graph_module: fx.GraphModule, head: HeadRegion, region_id: str) -> None:
    """Rewrite `head` in its graph.

    Args:
        graph_module: the graph that holds it.
        head: from `find_heads` on this graph.
        region_id: key of the registered live head.
    """
    graph = graph_module.graph
    _redirect_sizes(graph, head)
    with recording(graph, head.exit) as call:

        def cast(node: fx.Node) -> fx.Node:
            return (
                node
                if tensor_of(node).dtype is head.logits_dtype
                else call(torch.ops.aten.to.dtype, node, head.logits_dtype)
            )

        tokens = head.hidden
        for move in head.moves:
            if move.kind == "index":
                tokens = call(operator.getitem, tokens, move.argument)
            else:
                tokens = call(torch.reshape, tokens, (*move.argument, head.dims.hidden))
        tokens = cast(call(torch.reshape, tokens, (-1, head.dims.hidden)))
        labels = call(torch.reshape, head.labels, (-1,))
        weight = call(torch.t, head.weight) if head.is_transposed else head.weight
        bias = None if head.bias is None else cast(head.bias)
        wanted = list(head.wanted)
        op = torch.ops.memfine.head_loss.default
        results = call(op, tokens, cast(weight), bias, labels, head.divisor, wanted, head.saves_logits, region_id)
        loss = call(operator.getitem, results, 0)
        logits: dict[fx.Node, fx.Node] = {}
        if head.saves_logits:
            flat = call(operator.getitem, results, 5)
            shaped = call(torch.ops.aten.view_as.default, flat, _view_of_logits(call, head))
            for node in head.results:
                dtype = tensor_of(node).dtype
                logits[node] = shaped if dtype is head.logits_dtype else call(torch.ops.aten.to.dtype, shaped, dtype)
    head.exit.replace_all_uses_with(loss)
    _replace_results(graph, head.results, logits)
    casts = set(head.results) - set(head.nodes)
    for node in (*casts, *reversed(head.nodes)):
        erase_with_users(node)  # whose last users assert the sizes of what goes away
    graph.lint()
    graph_module.recompile()


def _redirect_sizes(graph: fx.Graph, head: HeadRegion) -> None:
    """Let readers of the logits' sizes read a view [...,V] of the hidden states."""
    inside = set(head.nodes)
    readers = [
        (node, user)
        for node in head.nodes
        for user in node.users
        if user not in inside and reads_sizes(user) and not is_only_asserted(user)
    ]
    if not readers:
        return
    with recording(graph, head.nodes[0]) as call:
        view = _view_of_logits(call, head)
    for node, user in readers:
        user.replace_input_with(node, view)


def _view_of_logits(call: Call, head: HeadRegion) -> fx.Node:
    """A view of the hidden states with the logits' sizes."""
    column = call(torch.narrow, head.hidden, -1, 0, 1)
    return call(torch.ops.aten.expand.default, column, (*[-1] * (tensor_of(head.hidden).ndim - 1), head.dims.vocab))


def _replace_results(graph: fx.Graph, results: Sequence[fx.Node], logits: Mapping[fx.Node, fx.Node]) -> None:
    """Put these logits, or None, where the graph returns others; `take_apart` may have taken their gradient off."""
    (output,) = graph.find_nodes(op="output")
    replacements: dict[fx.Node, fx.Node | None] = {}
    for node in results:
        replacements[node] = logits.get(node)
        replacements |= {user: logits.get(node) for user in node.users if target_name(user) == "detach"}
    if results:
        output.args = fx.map_arg(output.args, lambda node: replacements.get(node, node))
    for node in set(replacements) - set(results):
        graph.erase_node(node)


def take_apart(graph_module: fx.GraphModule, config: Config, given_up: Collection[fx.Node]) -> list[ReturnedLogits]:
    """Rewrite what a captured graph returns; one record for each of its results that were logits with a gradient.

    Args:
        graph_module: nothing of it is lowered yet.
        config: options for heads.
        given_up: results that will be None.
    """
    graph = graph_module.graph
    heads = find_heads(graph, replace(config, chunks_head=config.chunks_head or None, returns_logits=False))
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else []
    inputs = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    records = []
    for head in heads:
        if isinstance(head, Refusal) or not set(_operands(head)) <= set(inputs):
            continue
        logits = as_made(head.results, head.nodes[0])
        places = [place for place, node in enumerate(results) if node in logits and node not in given_up]
        for place in places:
            with graph.inserting_before(output):
                detached = graph.call_method("detach", (results[place],))
            detached.meta["example_value"] = tensor_of(results[place]).detach()
            results[place] = detached
            records.append(_record(head, place, len(results), inputs))
        if places:
            results.append(head.hidden)
    if records:
        output.args = (tuple(results),)
        graph.lint()
        graph_module.recompile()
    return records


def _operands(head: HeadRegion) -> Sequence[fx.Node]:
    return [node for node in (head.weight, head.bias) if node is not None]


def _record(head: HeadRegion, place: int, of_hidden: int, inputs: dict[fx.Node, int]) -> ReturnedLogits:
    bias = None if head.bias is None else inputs[head.bias]
    return ReturnedLogits(place, of_hidden, inputs[head.weight], bias, head.is_transposed, head.logits_dtype)
