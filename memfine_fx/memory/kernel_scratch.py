"""Scratch memory that a kernel allocates inside one call, beside its results.

The CPU's flash attention gives each thread buffers for one block of queries against one block of keys
(ATen/native/cpu/FlashAttentionKernel.cpp): scores and, going forward, sums and a block of results; going backward,
scores and their gradients. In low precision the scores are there in both precisions, and backward's products need
memory of oneDNN's own, for which the largest that was measured stands (see `_PACKED`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from memfine_fx.memory.sizes import size_expr
from memfine_fx.memory.symbols import ROWS

__all__ = ["product_scratch", "scratch_bytes"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_KEY_BLOCK = 512
_QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
"""(smallest length of the queries, queries in a block), longest first."""
_PACKED, _HEAD_STEP = 5, 64
"""Bytes a thread for each query and key of a block and each element of a head, heads rounded up: at least what oneDNN
took for bf16 with heads of 32 to 192 (tests/memory/test_kernel_scratch.py asks it of the machine at hand)."""
_PADDING_ROWS, _BLOCK_ROWS = 48, 560
"""Rows that are added to a product's, and the most that oneDNN has in its blocks at once."""


def scratch_bytes(node: fx.Node) -> sympy.Expr:
    """Bytes in the graph's symbols, for the number of threads that run now; 0 for kernels that need none."""
    if node.target is not _FORWARD and node.target is not _BACKWARD:
        return sympy.Integer(0)
    first = 0 if node.target is _FORWARD else 1  # backward's first argument is the gradient of the result
    query, key = (_value(argument) for argument in node.args[first : first + 2])
    length, head = size_expr(query.shape[-2]), size_expr(query.shape[-1])
    queries = sympy.Min(_query_block(length), length)
    keys = sympy.Min(_KEY_BLOCK, size_expr(key.shape[-2]))
    scores, itemsize = queries * keys, 0 if query.dtype is torch.float32 else query.dtype.itemsize
    if node.target is _FORWARD:
        of_thread = 4 * (scores + queries * (2 + head)) + itemsize * scores
    else:
        packed = (queries + keys) * _PACKED * _HEAD_STEP * sympy.ceiling(head / _HEAD_STEP) if itemsize else 0
        of_thread = 2 * (4 + itemsize) * scores + 4 * queries + packed
    return torch.get_num_threads() * of_thread


def product_scratch(shapes: Iterable[Sequence[int]], item_bytes: int, device_type: str) -> sympy.Expr:
    """Bytes in R of oneDNN's blocks of a low-precision product [a,R] @ [R,b] on a CPU; 0 elsewhere.

    At least what it took on one and two threads at sizes of 192 to 2048 and 97 to 2048 rows, where it grew no more
    beyond 539 rows (tests/memory/test_kernel_scratch.py asks it of the machine at hand); more threads may take more.

    Args:
        shapes: of the gradients, [a,b]; others have no product.
        item_bytes: of an element; at 4 it is not oneDNN that multiplies.
        device_type: "cpu" or "cuda".
    """
    widths = max((sum(shape) for shape in shapes if len(shape) == 2), default=0)
    if device_type != "cpu" or item_bytes >= 4:
        return sympy.Integer(0)
    return sympy.Rational(3, 2) * item_bytes * widths * sympy.Min(ROWS + _PADDING_ROWS, _BLOCK_ROWS)


def _query_block(length: sympy.Expr) -> sympy.Expr:
    if length.is_number:
        return sympy.Integer(next(block for least, block in _QUERY_BLOCKS if length >= least))
    return sympy.Piecewise(*((block, length >= least if least else True) for least, block in _QUERY_BLOCKS))


def _value(argument: Any) -> torch.Tensor:
    value: torch.Tensor = argument.meta["val"]
    return value
