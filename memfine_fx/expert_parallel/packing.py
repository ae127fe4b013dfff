"""Tensors that travel together as columns of one buffer, so that a round is one exchange and not one a tensor.

A small exchange costs what waiting for the other ranks costs: routing weights are a thousandth of the rows' bytes and
took as long. Columns of one dtype share a buffer [n,W] and are views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
        widths: dict[torch.dtype, int] = {}
        for width, dtype in self.columns:
            widths[dtype] = widths.get(dtype, 0) + max(1, width)
        return [like.new_empty((num_rows, width), dtype=dtype) for dtype, width in widths.items()]

    def views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The columns, [n,w] and [n], in buffers as from `buffers`."""
        by_dtype = {buffer.dtype: buffer for buffer in buffers}
        filled = dict.fromkeys(by_dtype, 0)
        found = []
        for width, dtype in self.columns:
            begin, buffer = filled[dtype], by_dtype[dtype]
            filled[dtype] = begin + max(1, width)
            found.append(buffer[:, begin : begin + width] if width else buffer[:, begin])
        return found

    def packed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors in buffers; as they are where no two share a dtype."""
        dtypes = [dtype for _, dtype in self.columns]
        if len(set(dtypes)) == len(dtypes):
            return [one if one.ndim == 2 else one.unsqueeze(1) for one in tensors]
        buffers = self.buffers(tensors[0].shape[0], tensors[0])
        for view, one in zip(self.views(buffers), tensors, strict=True):
            view.copy_(one)
        return buffers
