"""Fake tensors, storages of tensors, and trees of values."""

from __future__ import annotations

import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from memfine_fx.compat.checks import expect

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "check_storages",
    "disable_fake_tensor_cache",
    "is_quantized",
    "is_sharded",
    "storage_id",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]


def storage_id(value: object) -> int | None:
    """Identity of a tensor's storage, fake or not; None where it has none to show (values inside vmap)."""
    if not isinstance(value, torch.Tensor) or torch._C._functorch.is_batchedtensor(value):
        return None
    return int(value.untyped_storage()._cdata)


def check_storages() -> None:
    for mode in (torch.no_grad(), FakeTensorMode()):
        with mode:
            first, second = torch.empty(4), torch.empty(4)
        expect(storage_id(first) == storage_id(first[1:]), "a view has another storage than its base")
        expect(storage_id(first) != storage_id(second), "two tensors have one storage")
    inside: list[int | None] = []

    def look(row: torch.Tensor) -> torch.Tensor:
        inside.append(storage_id(row))
        return row

    torch.func.vmap(look)(torch.zeros(2, 2))
    expect(inside == [None], "values inside vmap show a storage")


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that keeps its numbers in other tensors (torchao's), and no shard of one."""
    return not is_sharded(tensor) and bool(is_traceable_wrapper_subclass(tensor))


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, as FSDP2 leaves a parameter between a layer's calls."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))
