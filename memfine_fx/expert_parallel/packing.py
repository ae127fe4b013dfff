"""Pack tensors that travel together as columns of one buffer, so that a round is one exchange, not one per tensor.

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
    """The layout of columns in buffers: (width, dtype) in order, width 0 for a single entry per row."""

    columns: tuple[tuple[int, torch.dtype], ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Packing:
        """Return the layout of tensors [n,w] and [n]."""
        return Packing(tuple((tensor.shape[1] if tensor.ndim == 2 else 0, tensor.dtype) for tensor in tensors))

    def buffers(self, num_rows: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Return one uninitialized buffer [n,W] per dtype, in the order in which dtypes first occur."""
        return [like.new_empty((num_rows, width), dtype=dtype) for dtype, width in self._widths().items()]

    def num_buffers(self, num_columns: int) -> int:
        """Return how many buffers hold the first `num_columns` columns: the first buffers."""
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
        """Return the columns, [n,w] and [n], as views of buffers as from `buffers`."""
        by_dtype = {buffer.dtype: buffer for buffer in buffers}
        filled = dict.fromkeys(by_dtype, 0)
        columns = []
        for width, dtype in self.columns:
            if dtype not in by_dtype:
                break
            begin, buffer = filled[dtype], by_dtype[dtype]
            filled[dtype] = begin + max(1, width)
            columns.append(buffer[:, begin : begin + width] if width else buffer[:, begin])
        return columns
