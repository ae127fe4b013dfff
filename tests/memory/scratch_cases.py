"""What kernels take here and what is counted, printed as JSON for the dtypes that are named: run as a script."""

from __future__ import annotations

import json
import sys

import torch

from memfine_fx.memory.kernel_probe import ATTENTION_SHAPES, PRODUCT_SHAPES, Kernel, Shape, measure
from memfine_fx.memory.kernel_scratch import counted_at

__all__ = ["rows"]

Row = tuple[str, str, Shape, int, int]
"""(dtype, kernel, shape, measured, counted)."""


def rows(dtype: torch.dtype) -> list[Row]:
    found: list[Row] = []
    for kernel, measured in measure(dtype).items():
        shapes = PRODUCT_SHAPES if kernel == "product" else ATTENTION_SHAPES
        for shape, num_bytes in zip(shapes, measured, strict=True):
            found.append((str(dtype), kernel, shape, num_bytes, _counted(kernel, shape, dtype)))
    return found


def _counted(kernel: Kernel, shape: Shape, dtype: torch.dtype) -> int:
    return counted_at(kernel, shape, dtype, torch.get_num_threads())


if __name__ == "__main__":
    print(json.dumps([row for name in sys.argv[1:] for row in rows(getattr(torch, name))]))
