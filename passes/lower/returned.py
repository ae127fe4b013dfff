"""Returned logits: their gradient is taken beside the compiled graph, so that it has no tangent [T,V] of zeros.

Before:  logits = linear(hidden, weight, bias);  ...;  return loss, logits
After:   logits = linear(hidden, weight, bias);  ...;  return loss, logits.detach(), hidden
         and outside of the graph an autograd node from hidden, weight and bias to logits (`runtime.returned`)

A compiled graph is one autograd node, and what gradients do not come for is given to it as zeros: a tensor of the
logits' size where a caller uses only the loss, which is what nearly every caller does. A tangent of hidden is V / H
times smaller. Who differentiates the logits gets the same gradients by one more product for each operand.

Only logits of which every reader is known (`head.find`), returned as the projection made them or cast.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import fx

from memfine_fx.config import Config
from memfine_fx.passes.dataflow import tensor_of
from memfine_fx.passes.head.find import as_made, find_heads
from memfine_fx.records import Refusal
from memfine_fx.records.heads import HeadRegion, ReturnedLogits

__all__ = ["take_apart"]


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
