"""Dispatch masks as ids: capacity routers that hand experts a one-hot mask with dropped tokens, not ids.

    mask = one_hot(index, E) * (place <= capacity)     ids  = memfine::ids_of_mask(mask)      E where dropped
    experts(mask)                                  ->  experts(one_hot(ids, E + 1)[..., :E])

Routing and capacity stay as they are; the experts' side then reads ids, as in every other spelling. `expose`
comes before finding, `conceal` after lowering: it puts the mask back wherever no region took the ids.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.tensors import FakeTensor
from memfine_fx.passes.dataflow import is_int_tensor, node_value, static_size, target_name
from memfine_fx.passes.read.dropped import ids_of_mask

__all__ = ["ExposedIds", "conceal", "expose", "ids_of_mask"]

_SAME_LAST_DIM = frozenset("view reshape unsqueeze to long int contiguous".split())
_PRODUCTS = frozenset("mul __mul__ imul __imul__ mul_".split())


@dataclass(frozen=True)
class ExposedIds:
    """A mask, its ids, and the nodes that make the mask again from them, last first."""

    mask: fx.Node
    made: tuple[fx.Node, ...]


def expose(graph_module: fx.GraphModule) -> list[ExposedIds]:
    """Let the readers of every dispatch mask read it through ids."""
    return [_expose(node) for node in list(graph_module.graph.nodes) if _is_last_mask(node)]


def conceal(graph_module: fx.GraphModule, exposed: list[ExposedIds]) -> None:
    """Put masks back in front of the readers that remain."""
    alive = set(graph_module.graph.nodes) if exposed else set()  # lowering may have erased some
    for one in exposed:
        one.made[0].replace_all_uses_with(one.mask)
        for node in one.made:
            if node in alive and not node.users:
                graph_module.graph.erase_node(node)
    if exposed:
        graph_module.recompile()


def _expose(mask: fx.Node) -> ExposedIds:
    value = node_value(mask)
    assert isinstance(value, FakeTensor)
    num_experts = int(value.shape[-1])
    readers = list(mask.users)
    graph = mask.graph
    with graph.inserting_after(mask):
        ids = graph.call_function(torch.ops.memfine.ids_of_mask.default, (mask,))
    with graph.inserting_after(ids):
        one_hot = graph.call_function(torch.nn.functional.one_hot, (ids, num_experts + 1))
    with graph.inserting_after(one_hot):
        experts: Any = (Ellipsis, slice(None, num_experts))
        again = graph.call_function(operator.getitem, (one_hot, experts))
    for reader in readers:
        reader.replace_input_with(mask, again)
    for node in (ids, one_hot, again):
        node.meta.update({key: held for key, held in mask.meta.items() if key not in ("example_value", "val")})
    with value.fake_mode:
        ids.meta["example_value"] = value.new_empty(value.shape[:-1], dtype=torch.int64)
        one_hot.meta["example_value"] = value.new_empty((*value.shape[:-1], num_experts + 1), dtype=torch.int64)
        again.meta["example_value"] = one_hot.meta["example_value"][..., :num_experts]
    return ExposedIds(mask, (again, one_hot, ids))


def _is_last_mask(node: fx.Node) -> bool:
    """A [T,K,E] mask with dropped choices, at the end of what makes it."""
    value = node_value(node)
    is_mask = isinstance(value, FakeTensor) and value.ndim == 3 and value.dtype is torch.int64
    if not is_mask or not node.users or not _is_mask(node, has_product=False):
        return False
    return not any(_is_mask(user, has_product=False) for user in node.users)


def _is_mask(node: fx.Node, *, has_product: bool) -> bool:
    """Whether a node is a one-hot of ids times zeros and ones; its experts stand in the last dimension."""
    name, source = target_name(node), node.args[0] if node.args else None
    if name == "one_hot":
        return has_product
    if not is_int_tensor(node) or not isinstance(source, fx.Node):
        return False
    if name in _SAME_LAST_DIM:
        return _last_size(source) == _last_size(node) is not None and _is_mask(source, has_product=has_product)
    if name not in _PRODUCTS or len(node.args) != 2:
        return False
    pairs: list[tuple[Any, Any]] = [(source, node.args[1]), (node.args[1], source)]
    return any(
        isinstance(mask, fx.Node) and _is_bool(other) and _is_mask(mask, has_product=True) for mask, other in pairs
    )


def _is_bool(node: Any) -> bool:
    value = node_value(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _last_size(node: fx.Node) -> int | None:
    value = node_value(node)
    return static_size(value.shape[-1]) if isinstance(value, torch.Tensor) and value.ndim else None
