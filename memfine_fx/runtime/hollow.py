"""Tensors of any size that take no memory: address space, which is never read or written.

A compiled graph hands tensors from forward to backward whose sizes it knows beforehand, and what they hold is decided
when it runs. So there goes a tensor of the known size without memory, which may own another one that has some. Memory
of a tensor that is owned goes with the storage of its owner, whoever holds that.
"""

from __future__ import annotations

import math
import mmap
import weakref

import torch

__all__ = ["held_by", "hollow"]


class _Pages(mmap.mmap):
    """A stretch of address space, and the tensor that it owns."""

    held: torch.Tensor | None = None


_empty: list[_Pages] = []
"""One stretch for all tensors that own nothing."""
_owners: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()
"""By the address where they begin."""


def hollow(shape: tuple[int, ...], dtype: torch.dtype, holding: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor without memory on the CPU that owns `holding`."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    pages = _shared(count * dtype.itemsize) if holding is None else _stretch(count * dtype.itemsize)
    tensor = torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
    if holding is not None:
        pages.held = holding
        _owners[tensor.data_ptr()] = pages
    return tensor


def held_by(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a hollow tensor owns; None of any other, a copy of one among them."""
    pages = _owners.get(tensor.data_ptr())
    return None if pages is None else pages.held


def _shared(num_bytes: int) -> _Pages:
    pages = next((one for one in _empty if len(one) >= num_bytes), None)
    if pages is None:
        pages = _stretch(num_bytes)
        _empty[:] = [pages]  # a smaller stretch goes with the last tensor in it
    return pages


def _stretch(num_bytes: int) -> _Pages:
    return _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
