"""Scratch that oneDNN takes for one product of matrices in low precision on a CPU, by formulas.

With instructions for bf16 and no AMX tiles, each thread has for a block of 256 rows of the result

1. a panel of the right factor, 64 columns of as many of the inner dimension as it multiplies at once;
2. a copy of the left factor's block, where that lies column by column or has long rows of a power of two;
3. sums in fp32: 64 columns, or up to 1024 where the left factor is copied and the inner dimension is walked in steps.

**An inner dimension that is a power of two from 2048 on** is divided among the threads where the left factor lies
column by column, as in a weight's gradient, and the result has fewer panels than there are threads: each thread then
has sums of the whole result. On 64 threads that is 823 MB for a result [1536,2048], and 20 MB with one row less.
`undivided` prevents it by a copy of the left factor, which oneDNN would make as well, block by block.

A factor that is neither dense row by row nor column by column, as a head of attention between others, is copied whole
first (ATen/native/mkldnn/Matmul.cpp, `is_mkldnn_optimized_format`).

Seen by the allocator's events at 6,000 sizes on one and two threads and 500 on 3 to 64, AMD EPYC of family 25; on one
of family 26 none of 6,750 took more, and all together 0.55 to 0.73 of it (tests/memory/test_products.py asks it of the
machine at hand). In fp16 the same stands with factors of 4 bytes, which
has not been measured. With AMX a bound stands for what a thread packs of a weight's gradient, as was measured; other
products were not measured there, and the same formulas stand for them. What this machine's kernels take beyond a
formula is added to it (`kernel_probe`). Without instructions for bf16 the result is there in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from memfine_fx.memory.machine import CpuFeatures, cpu_features
from memfine_fx.memory.sizes import ROWS, is_contiguous, size_expr

__all__ = ["MULTIPLYING", "ROUNDING", "Product", "blocks_of", "gradient_blocks", "product_of", "undivided"]

MULTIPLYING = ("mm", "addmm", "bmm", "baddbmm")
"""Operators whose last two tensors are multiplied, as ATen and Inductor's wrappers name them."""
ROUNDING = 4096
"""What small things are rounded up to."""
_FLOAT_BYTES = 4
_BLOCK_ROWS, _PANEL, _STEP = 256, 64, 32
"""Rows of a block, columns of a panel, and what the inner dimension is rounded up to."""
_AT_ONCE, _AT_ONCE_COPIED = 1024, 512
"""The most of the inner dimension at once, and where the left factor lies column by column."""
_MOST_SUMS, _LEAST_SUMS = 1024, 128
"""Columns of sums where the inner dimension is walked in steps."""
_DIVIDED, _LONG_ROWS, _MANY_ROWS = 2048, 4096, 1024
"""The least inner dimension that is divided; the least length of rows that are copied, if there are so many."""
_OF_THREAD = 1152

_AMX_LEFT, _AMX_STEP, _AMX_RIGHT, _AMX_PADDING_ROWS = 256, 16, 64, 288
"""With AMX tiles: the most of a product's left side that a thread packs, twice the side rounded up to this, with so
many columns of the right one; and rows beyond the product's."""
_AMX_MOST = ((64, 2_500_000), (128, 1_750_000))
"""Smaller side up to which a thread packs at most so many bytes, where the larger is longer than 64; both no longer
than that, rows are packed all at once."""
_AMX_MOST_WIDE = 1_400_000
"""The most where both sides are longer."""


@dataclass(frozen=True)
class Product:
    """left [...,a,k] @ right [...,k,b]; sizes are numbers or expressions in a graph's symbols.

    Args:
        left, inner, right: a, k, b.
        batch: products of matrices in one call.
        is_by_column: whether the left factor lies column by column, as the transposed rows of a weight's gradient do.
        dtype: of the factors.
        copied: numbers of factors that are copied whole first.
    """

    left: sympy.Expr
    inner: sympy.Expr
    right: sympy.Expr
    batch: sympy.Expr
    is_by_column: bool
    dtype: torch.dtype
    copied: sympy.Expr = sympy.S.Zero

    @property
    def input_bytes(self) -> sympy.Expr:
        return self.dtype.itemsize * self.batch * self.inner * (self.left + self.right)


Sizes = Sequence[sympy.Expr | int | torch.SymInt]


def product_of(left: Sizes, left_strides: Sizes, right: Sizes, right_strides: Sizes, dtype: torch.dtype) -> Product:
    """The product of two factors, [a,k] @ [k,b] or in a batch.

    Args:
        left, right: sizes.
        left_strides, right_strides: strides.
        dtype: of both.
    """
    factors = [
        ([size_expr(size) for size in sizes], [size_expr(stride) for stride in strides])
        for sizes, strides in ((left, left_strides), (right, right_strides))
    ]
    copied = [sympy.prod(sizes) for sizes, strides in factors if not _is_dense(sizes, strides)]
    (sizes, strides), (right_sizes, _) = factors
    *batch, rows, inner = sizes
    is_by_column = not is_contiguous(sizes, strides) and _is_dense(sizes, strides)
    return Product(rows, inner, right_sizes[-1], sympy.prod(batch), is_by_column, dtype, sum(copied, sympy.S.Zero))


def _is_dense(sizes: list[sympy.Expr], strides: list[sympy.Expr]) -> bool:
    """Whether matrices lie row by row or column by column, one behind the other."""
    turned = [*range(len(sizes) - 2), -1, -2]
    return is_contiguous(sizes, strides) or is_contiguous([sizes[i] for i in turned], [strides[i] for i in turned])


def undivided(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [a,k], copied row by row where oneDNN would divide k of left @ right [k,b] among its threads."""
    inner, columns = right.shape
    if left.device.type != "cpu" or left.stride(0) != 1 or inner < _DIVIDED or inner & (inner - 1):
        return left
    is_divided = _has_few_panels(columns, torch.get_num_threads()) and _may_divide(left.dtype, cpu_features())
    return left.contiguous() if is_divided else left


def _may_divide(dtype: torch.dtype, features: CpuFeatures) -> bool:
    """NOTE: with AMX it was not tried; a copy does no harm there."""
    return dtype is torch.bfloat16 and features.bf16 == "native"


def _has_few_panels(columns: int | sympy.Expr, threads: int) -> bool | sympy.Basic:
    return columns <= _PANEL * (threads - 1)


@functools.lru_cache(maxsize=1024)  # expressions take 4 to 25 ms, and a model asks for the same in every layer
def blocks_of(product: Product, features: CpuFeatures, threads: int) -> sympy.Expr:
    """Bytes in the product's symbols; 0 where oneDNN does not multiply, or needs none.

    Args:
        product: of a CPU.
        features: what oneDNN may use of it.
        threads: that multiply.
    """
    return _blocks(product, features, threads, divides=True)


@functools.lru_cache(maxsize=1024)  # 0.25 s each; a search asks for the same at every size that it tries
def gradient_blocks(
    shapes: frozenset[tuple[int, int]], dtype: torch.dtype, features: CpuFeatures, threads: int
) -> sympy.Expr:
    """Bytes in R of the largest of the products [a,R] @ [R,b] of weights' gradients, for up to R rows, each with its
    left factor as `undivided` leaves it.
    """
    byte_counts: list[sympy.Expr] = []
    for left, right in shapes:
        sizes = sympy.Integer(left), ROWS, sympy.Integer(right), sympy.S.One
        byte_counts.append(_blocks(Product(*sizes, True, dtype), features, threads, divides=False))
        if _may_divide(dtype, features) and _has_few_panels(right, threads):
            rows = _blocks(Product(*sizes, False, dtype), features, threads, divides=False)
            byte_counts.append(_from(ROWS, _DIVIDED) * (dtype.itemsize * left * ROWS + rows))
    return sympy.Max(*byte_counts)


def _blocks(product: Product, features: CpuFeatures, threads: int, *, divides: bool) -> sympy.Expr:
    item_bytes = product.dtype.itemsize
    copied = product.copied * item_bytes
    if product.dtype is torch.float16:
        if not features.fp16:
            return sympy.S.Zero
        item_bytes = _FLOAT_BYTES
    elif product.dtype is not torch.bfloat16 or features.bf16 == "none":
        return sympy.S.Zero
    elif features.bf16 == "converted":
        return copied + _FLOAT_BYTES * product.batch * product.left * product.right + ROUNDING
    elif features.packs_bf16 and product.is_by_column:
        return copied + threads * _packed_for_tiles(product)
    return copied + threads * _of_thread(product, item_bytes, threads, divides=divides)


def _of_thread(product: Product, item_bytes: int, threads: int, *, divides: bool) -> sympy.Expr:
    left, inner, right = product.left, product.inner, product.right
    at_once = sympy.Min(_rounded_up(inner, _STEP), _AT_ONCE_COPIED if product.is_by_column else _AT_ONCE)
    rows = sympy.Min(left, _BLOCK_ROWS)
    panel, narrow = item_bytes * _PANEL * at_once, sympy.Min(_rounded_up(right, 16), _PANEL)
    wide = sympy.Min(sympy.Max(_rounded_up(right, _PANEL), _LEAST_SUMS), _MOST_SUMS)
    scratch = panel + _FLOAT_BYTES * rows * narrow + _OF_THREAD
    is_copied = sympy.S.One if product.is_by_column else _from(inner, _LONG_ROWS)
    if is_copied != 0:
        more_sums = _FLOAT_BYTES * rows * (wide - narrow) * _from(inner, at_once + 1)
        if not product.is_by_column:
            is_copied *= _from(left, _MANY_ROWS) * _is_power(inner)
        scratch += is_copied * (item_bytes * rows * (at_once + _STEP) + more_sums)
    if not (divides and product.is_by_column and threads > 1):
        return scratch
    few = sympy.Piecewise((1, _has_few_panels(right, threads)), (0, True))
    if few == 0:
        return scratch
    whole = panel + item_bytes * rows * (at_once + _STEP) + _FLOAT_BYTES * left * right + _OF_THREAD
    return sympy.Max(scratch, few * _from(inner, _DIVIDED) * _is_power(inner) * whole)


def _from(value: sympy.Expr, least: int | sympy.Expr) -> sympy.Expr:
    """Return 1 where an integer is at least `least`, else 0, as an expression that a plan in R can be solved with."""
    return sympy.Min(1, sympy.Max(0, value - least + 1))


def _is_power(value: sympy.Expr) -> sympy.Expr:
    """Return 1 where a number of at least 2048 is a power of two, else 0; 1 for R, which stands for all numbers up to
    it.
    """
    if value.is_number:
        return sympy.Integer(int(value) & (int(value) - 1) == 0)
    if value == ROWS:
        return sympy.S.One
    return sympy.Piecewise((1, sympy.Or(*(sympy.Eq(value, 1 << power) for power in range(11, 28)))), (0, True))


def _rounded_up(length: sympy.Expr, step: int) -> sympy.Expr:
    """Up to the next multiple; where it is no number, at least that."""
    return step * sympy.ceiling(length / step) if length.is_number else length + step - 1


def _packed_for_tiles(product: Product) -> sympy.Expr:
    """Return the bytes that a thread packs of a product's bf16 factors for AMX tiles."""
    left, right = product.left, product.right
    sides = sympy.Min(2 * _rounded_up(left, _AMX_STEP), _AMX_LEFT) + _AMX_RIGHT
    packed = product.dtype.itemsize * sides * (product.inner + _AMX_PADDING_ROWS)
    most = sympy.Piecewise(
        (packed, sympy.Max(left, right) <= _AMX_RIGHT),
        *((bound, sympy.Min(left, right) <= side) for side, bound in _AMX_MOST),
        (_AMX_MOST_WIDE, True),
    )
    return sympy.Min(packed, most)
