"""Slots: capacity models put each expert's rows in a buffer [E,C,H] before the experts see them.

Dispatch and combine count tokens against each other's, so they stay outside and unchanged, dropped tokens and all.
What is row-wise is between: rows of an expert through that expert's weights. That alone is cut out; its rows
already stand in expert order, one "token" each, and are chunked over experts and capacity.

    h = einsum("ech,ehf->ecf", buffer, W)    or    bmm(buffer, W)    ->    h = rows @ W[e]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from memfine_fx.passes.dataflow import Dataflow, is_float_tensor, node_value, static_size
from memfine_fx.records import Cut

__all__ = ["expert_dims", "slot_cuts"]


def slot_cuts(flow: Dataflow, expert_ops: tuple[fx.Node, ...]) -> Iterator[tuple[Cut, fx.Node]]:
    """Cuts from the rows in slots to the last expert matmul, the longest first, with the node of those rows."""
    ops = sorted(expert_ops, key=flow.position.__getitem__)
    for num_ops in range(len(ops), 1, -1):
        rows = _rows_operand(flow, ops[0])
        last = ops[num_ops - 1]
        if rows is None or last not in flow.descendants([rows]):
            continue
        inside = flow.descendants([rows]) & (flow.ancestors([last]) | {last})
        inside -= _filling(flow, rows, ops[0])
        nodes = tuple(sorted(inside, key=flow.position.__getitem__))
        inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        yield Cut(None, last, nodes, tuple(inputs)), rows


def _filling(flow: Dataflow, rows: fx.Node, first: fx.Node) -> set[fx.Node]:
    """What writes the rows into their slots before the experts read them."""
    return {
        node
        for node, targets in flow.mutations.items()
        if flow.position[node] < flow.position[first] and flow.root(rows) in map(flow.root, targets)
    }


def expert_dims(rows: fx.Node, num_experts: int | None) -> list[int]:
    """Dimensions of the rows that may be the experts."""
    value = node_value(rows)
    assert isinstance(value, torch.Tensor)
    return [dim for dim, size in enumerate(value.shape[:-1]) if static_size(size) == num_experts is not None]


def _rows_operand(flow: Dataflow, op: fx.Node) -> fx.Node | None:
    """The operand that is no parameter: [...,E,...,H]."""
    for operand in op.all_input_nodes:
        value = node_value(operand)
        is_stack = isinstance(value, torch.Tensor) and value.ndim >= 3 and is_float_tensor(operand)
        if is_stack and not _is_weight(flow, operand):
            return operand
    return None


def _is_weight(flow: Dataflow, node: fx.Node) -> bool:
    """Whether a node is made of parameters alone."""
    made_of = [source for source in flow.ancestors([node]) | {node} if source.op in ("placeholder", "get_attr")]
    tensors = [value for value in map(node_value, made_of) if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(isinstance(value, torch.nn.Parameter) for value in tensors)
