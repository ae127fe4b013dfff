"""Scratch memory that a kernel allocates inside one call, beside its results.

The CPU's flash attention gives each thread buffers for one block of queries against one block of keys
(ATen/native/cpu/FlashAttentionKernel.cpp): scores and, going forward, sums and a block of results; going backward,
scores and their gradients. In low precision the scores are there in both precisions, and backward's products need
memory of oneDNN's own, for which the largest that was measured stands (see `_PACKED`).
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

__all__ = ["scratch_bytes"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_KEY_BLOCK = 512
_QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
"""(smallest length of the queries, queries in a block), longest first."""
_PACKED, _HEAD_STEP = 5, 64
"""Bytes a thread for each query and key of a block and each element of a head, heads rounded up: at least what oneDNN
took for bf16 with heads of 32 to 192 (tests/memory/test_kernel_scratch.py asks it of the machine at hand)."""


def scratch_bytes(node: fx.Node) -> sympy.Expr:
    """Bytes in the graph's symbols, for the number of threads that run now; 0 for kernels that need none."""
    if node.target is not _FORWARD and node.target is not _BACKWARD:
        return sympy.Integer(0)
    first = 0 if node.target is _FORWARD else 1  # backward's first argument is the gradient of the result
    query, key = (_value(argument) for argument in node.args[first : first + 2])
    length, head = _expr(query.shape[-2]), _expr(query.shape[-1])
    queries = sympy.Min(_query_block(length), length)
    keys = sympy.Min(_KEY_BLOCK, _expr(key.shape[-2]))
    scores, itemsize = queries * keys, 0 if query.dtype is torch.float32 else query.dtype.itemsize
    if node.target is _FORWARD:
        of_thread = 4 * (scores + queries * (2 + head)) + itemsize * scores
    else:
        packed = (queries + keys) * _PACKED * _HEAD_STEP * sympy.ceiling(head / _HEAD_STEP) if itemsize else 0
        of_thread = 2 * (4 + itemsize) * scores + 4 * queries + packed
    return torch.get_num_threads() * of_thread


def _query_block(length: sympy.Expr) -> sympy.Expr:
    if length.is_number:
        return sympy.Integer(next(block for least, block in _QUERY_BLOCKS if length >= least))
    return sympy.Piecewise(*((block, length >= least if least else True) for least, block in _QUERY_BLOCKS))


def _value(argument: Any) -> torch.Tensor:
    value: torch.Tensor = argument.meta["val"]
    return value


def _expr(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
