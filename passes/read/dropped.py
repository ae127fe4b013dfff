"""Dropped choices: capacity routers that hand experts a one-hot mask in which some tokens are missing, not ids.

    mask = one_hot(index, E) * (place <= capacity)     ids = memfine::ids_of_mask(mask)      E where dropped

Routing and capacity stay as they are; a region that begins at such a mask takes the ids that are made of it.
"""

from __future__ import annotations

import torch
from torch import fx

from memfine_fx.compat.tensors import FakeTensor
from memfine_fx.passes.dataflow import tensor_of

__all__ = ["drop_unread_ids", "ids_of_mask", "insert_ids"]


@torch.library.custom_op("memfine::ids_of_mask", mutates_args=())
def ids_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """[T,K]: which expert each choice goes to; E where it was dropped.

    Args:
        mask: [T,K,E] ints, at most one of them nonzero for each token and choice.
    """
    return torch.where(mask.amax(dim=-1) > 0, mask.argmax(dim=-1), mask.shape[-1])


@ids_of_mask.register_fake
def _(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty(mask.shape[:-1], dtype=torch.int64)


def insert_ids(mask: fx.Node) -> fx.Node:
    """The ids of a mask, behind it in its graph; nothing else of the graph changes."""
    value = tensor_of(mask)
    assert isinstance(value, FakeTensor)
    with mask.graph.inserting_after(mask):
        ids = mask.graph.call_function(torch.ops.memfine.ids_of_mask.default, (mask,))
    ids.meta.update({key: meta_value for key, meta_value in mask.meta.items() if key not in ("example_value", "val")})
    with value.fake_mode:
        ids.meta["example_value"] = value.new_empty(value.shape[:-1], dtype=torch.int64)
    return ids


def drop_unread_ids(graph_module: fx.GraphModule) -> None:
    """Erase the ids of regions that were not lowered."""
    unread = [
        node
        for node in graph_module.graph.nodes
        if node.target is torch.ops.memfine.ids_of_mask.default and not node.users
    ]
    for node in unread:
        graph_module.graph.erase_node(node)
    if unread:
        graph_module.recompile()
