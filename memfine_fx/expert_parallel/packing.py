"""Tensors that travel together as columns of one buffer, so that a round is one exchange and not one a tensor.

A small exchange costs what waiting for the other ranks costs: routing weights are a thousandth of the rows' bytes and
took as long. Columns of one dtype share a buffer [n,W] and are views of it. Rows of a shared buffer are padded to
multiples of 16 bytes, so that every row can be read in wide loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfine_fx.memory.region_bytes import padded_bytes

__all__ = ["Packing"]


@dataclass(frozen=True)
class Packing:
    """Columns in order: (width, dtype), width 0 for a single entry a row."""

    columns: tuple[tuple[int, torch.dtype], ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Packing:
        """Of tensors [n,w] and [n]."""
        return Packing(tuple((one.shape[1] if one.ndim == 2 else 0, one.dtype) for one in tensors))

    def buffers(self, num_rows: int, like: torch.Tensor) -> list[torch.Tensor]:
        """One buffer [n,W] a dtype, in the order in which dtypes come first."""
        return [like.new_empty((num_rows, width), dtype=dtype) for dtype, width in self._widths().items()]

    def num_buffers(self, num_columns: int) -> int:
        """How many buffers the first columns lie in: the first ones."""
        return len({dtype for _, dtype in self.columns[:num_columns]})

    def _widths(self) -> dict[torch.dtype, int]:
        widths: dict[torch.dtype, list[int]] = {}
        for width, dtype in self.columns:
            widths.setdefault(dtype, []).append(max(1, width))
        return {
            dtype: own[0] if len(own) == 1 else padded_bytes(sum(own) * dtype.itemsize) // dtype.itemsize
            for dtype, own in widths.items()
        }

    def views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The columns, [n,w] and [n], in buffers as from `buffers`."""
        by_dtype = {buffer.dtype: buffer for buffer in buffers}
        filled = dict.fromkeys(by_dtype, 0)
        found = []
        for width, dtype in self.columns:
            if dtype not in by_dtype:
                break
            begin, buffer = filled[dtype], by_dtype[dtype]
            filled[dtype] = begin + max(1, width)
            found.append(buffer[:, begin : begin + width] if width else buffer[:, begin])
        return found
