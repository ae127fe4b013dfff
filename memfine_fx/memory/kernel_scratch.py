"""Scratch memory that a kernel allocates inside one call, beside its results.

The CPU's flash attention gives each thread buffers for one block of queries against one block of keys
(ATen/native/cpu/FlashAttentionKernel.cpp): scores and, going forward, sums and a block of results; going backward,
scores and their gradients. In low precision the scores are there in both precisions. Beyond that

1. with AMX, forward packs all keys and values first, where the products are many enough to pay for it;
2. backward's products need memory of oneDNN's own, for which a bound on what was measured stands;
3. backward copies a gradient that does not lie as [B,S,H,D] in memory.

Products of matrices in low precision take scratch of oneDNN's (`products`), outside of attention too. A convolution on
a CPU takes blocked copies of its weight and result, and going backward of its weight and the result's gradient.

A pointwise kernel of a CPU whose operands differ in dtype casts them first. A product with a weight in 4 bits
(`compat.bitsandbytes.linear_4bit`) makes the weight whole, beside its scales as floats where these are quantized too.
On CUDA, kernels that read packed numbers do with less where rows are few.

What oneDNN does depends on the CPU (`machine.CpuFeatures`). The formulas are held against this machine's kernels once
(`kernel_probe`): where these take more, what they take is counted, and a warning says so.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from memfine_fx.compat.bitsandbytes import LINEAR_4BIT
from memfine_fx.compat.functorch import call_under_random_state
from memfine_fx.compat.operators import OpOverload, op_name, qualified_name
from memfine_fx.memory.kernel_probe import (
    PRODUCT_SHAPES,
    Excess,
    Kernel,
    Shape,
    excess_of,
    input_bytes,
    measured_scratch,
    shapes_of,
)
from memfine_fx.memory.machine import CpuFeatures, cpu_features
from memfine_fx.memory.products import MULTIPLYING, ROUNDING, Product, blocks_of, gradient_blocks, product_of
from memfine_fx.memory.sizes import ROWS, is_contiguous, size_expr
from memfine_fx.units import readable_bytes

__all__ = [
    "Attention",
    "backward_scratch",
    "cast_bytes",
    "counted_at",
    "forward_scratch",
    "gradient_scratch",
    "product_scratch",
    "scratch_bytes",
]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_KEY_BLOCK = 512
_CONVOLUTIONS: Mapping[object, int] = {
    torch.ops.aten.convolution.default: 1,
    torch.ops.aten.convolution_backward.default: 2,
}
"""Convolution -> place of the weight among its arguments."""
_QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
"""(smallest length of the queries, queries in a block), longest first."""
_PACKING = {torch.bfloat16: (64, 4), torch.float16: (16, 1)}
"""Dtype -> the fewest queries and keys that are packed, and how many products of a thread must share a packed key."""
_TILE, _HALF_TILE, _INNER_BLOCK = 64, 32, 256
"""oneDNN rounds keys and queries of a block up to these, and takes at most so many keys at once."""
_FP16_COLUMNS = 80
"""Columns that it converts to fp32 beside the scores, in fp16."""
_CONDITIONAL = ("where", "masked_fill")
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Attention:
    """One call of CPU flash attention; sizes are numbers or expressions in a graph's symbols.

    Queries are [batch, heads, queries, width], keys and values [batch, key_heads, keys, width].
    """

    batch: sympy.Expr
    heads: sympy.Expr
    key_heads: sympy.Expr
    queries: sympy.Expr
    keys: sympy.Expr
    width: sympy.Expr
    dtype: torch.dtype
    is_causal: bool

    @property
    def query_block(self) -> sympy.Expr:
        """Queries in a block, as many as there are if these are fewer."""
        return sympy.Min(self.split, self.queries)

    @property
    def key_block(self) -> sympy.Expr:
        return sympy.Min(_KEY_BLOCK, self.keys)

    @property
    def split(self) -> sympy.Expr:
        """Queries in a block of a long sequence."""
        if self.queries.is_number:
            return sympy.Integer(next(block for least, block in _QUERY_BLOCKS if self.queries >= least))
        return sympy.Piecewise(*((block, self.queries >= least if least else True) for least, block in _QUERY_BLOCKS))

    @property
    def low_bytes(self) -> int:
        """Bytes of an element of what is there a second time, in low precision."""
        return 0 if self.dtype is torch.float32 else self.dtype.itemsize


def scratch_bytes(node: fx.Node) -> sympy.Expr:
    """Bytes in the graph's symbols, for the number of threads that run now; 0 for kernels that need none."""
    target, arguments = call_under_random_state(node)
    if qualified_name(target) == LINEAR_4BIT:
        return _unpacked(arguments)
    if isinstance(target, OpOverload) and op_name(target) in MULTIPLYING:
        return _multiplied(target, arguments)
    if target in _CONVOLUTIONS:
        return _convolved(node)
    if target is not _FORWARD and target is not _BACKWARD:
        return sympy.Integer(0)
    call, threads, features = _attention(target, arguments, node.kwargs), torch.get_num_threads(), cpu_features()
    inputs = _input_bytes(call)
    if target is _FORWARD:
        return _with_excess(forward_scratch(call, features, threads), inputs, _excess("forward", call.dtype, threads))
    needed = _with_excess(backward_scratch(call, features, threads), inputs, _excess("backward", call.dtype, threads))
    return needed + _copied_gradient(arguments[0])


def _multiplied(target: OpOverload, arguments: Sequence[Any]) -> sympy.Expr:
    first = 1 if op_name(target) in ("addmm", "baddbmm") else 0
    left, right = (_value(argument) for argument in arguments[first : first + 2])
    if left.device.type != "cpu" or left.dtype.itemsize >= 4:
        return sympy.Integer(0)
    return product_scratch(product_of(left.shape, left.stride(), right.shape, right.stride(), left.dtype))


def _convolved(node: fx.Node) -> sympy.Expr:
    weight = _value(node.args[_CONVOLUTIONS[node.target]])
    result = _value(node if node.target is torch.ops.aten.convolution.default else node.args[0])
    if result.device.type != "cpu":
        return sympy.Integer(0)
    return sum((size_expr(copied.numel()) * copied.itemsize for copied in (result, weight)), sympy.Integer(0))


def cast_bytes(node: fx.Node) -> sympy.Expr:
    """Bytes that a pointwise kernel of a CPU takes for operands of another dtype than it computes in: it casts them
    first, whole. Code that is generated, and kernels of CUDA, cast each number where they read it.
    """
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return sympy.Integer(0)
    values = [source.meta.get("val") for source in node.all_input_nodes]
    operands = [
        value for value in values if isinstance(value, torch.Tensor) and value.ndim and value.device.type == "cpu"
    ]
    if op_name(target) in _CONDITIONAL:
        operands = [operand for operand in operands if operand.dtype is not torch.bool]
    common = functools.reduce(torch.promote_types, (operand.dtype for operand in operands), torch.bool)
    return sum(
        (size_expr(operand.numel()) * common.itemsize for operand in operands if operand.dtype is not common),
        sympy.Integer(0),
    )


@functools.lru_cache(maxsize=256)  # a model asks for the same call in every layer
def forward_scratch(call: Attention, features: CpuFeatures, threads: int) -> sympy.Expr:
    """Bytes beside the results of attention itself."""
    queries, keys, width = call.query_block, call.key_block, call.width
    of_thread = 4 * (queries * keys + queries * (2 + width)) + call.low_bytes * queries * keys
    packs = {torch.bfloat16: features.packs_bf16, torch.float16: features.packs_fp16}.get(call.dtype, False)
    return threads * of_thread + (_packed(call, threads) if packs else 0)


def _packed(call: Attention, threads: int) -> sympy.Expr:
    """Keys and values of all heads, padded to even lengths, and a block of them and of queries for each thread.

    NOTE: packing pays, as the kernel sees it, if each packed key meets enough queries in one thread. Causal attention
    was given the longer sequence there in older versions, which packs no less often, and is what stands here.
    """
    queries, keys, width = call.query_block, call.key_block, call.width
    shared = call.batch * call.key_heads * (_rounded_up(width, 2) * call.keys + _rounded_up(call.keys, 2) * width)
    padded = queries * (_rounded_up(keys, 2) - keys) + sympy.Mod(width, 2) * queries * _rounded_up(width, 2)
    least, products = _PACKING[call.dtype]
    blocks = call.batch * call.heads * sympy.ceiling(call.queries / queries)
    met = call.queries if call.is_causal else call.keys
    pays = sympy.And(
        call.queries >= least,
        call.keys >= least,
        sympy.ceiling(blocks / threads) * queries * met >= products * call.batch * call.key_heads * call.keys,
    )
    packed = call.low_bytes * (shared + threads * (keys * width + padded))
    return sympy.Piecewise((packed, pays), (0, True))


@functools.lru_cache(maxsize=256)
def backward_scratch(call: Attention, features: CpuFeatures, threads: int) -> sympy.Expr:
    """Bytes beside the gradients of queries, keys and values."""
    queries, keys = call.query_block, call.key_block
    of_thread = 2 * (4 + call.low_bytes) * queries * keys + 4 * queries
    return threads * (of_thread + _products(call, features))


def _products(call: Attention, features: CpuFeatures) -> sympy.Expr:
    """Return the bytes that oneDNN allocates for those products of one thread whose results are in low precision.

    With instructions for bf16 it was exactly this without AMX where sizes divide; all others are bounds on what was
    measured (tests/memory/data/attention_scratch.json, and tests/memory/test_kernel_scratch.py on the machine at hand).
    """
    queries, keys = call.query_block, call.key_block
    if call.dtype is torch.float16 and features.fp16:
        return 4 * (queries * keys + _FP16_COLUMNS * (queries + keys)) + ROUNDING
    if call.dtype is not torch.bfloat16 or features.bf16 == "none":
        return sympy.Integer(0)
    if features.bf16 == "converted":
        return 4 * sympy.Max(queries, keys) * call.width + ROUNDING
    rows, columns = _rounded_up(queries, _HALF_TILE), _rounded_up(keys, _TILE)
    inner = sympy.Min(columns, _INNER_BLOCK)
    tiles = 2 * _TILE * columns if features.packs_bf16 else 0
    return 2 * inner * rows + 2 * _TILE * rows + 4 * _TILE * inner + tiles + ROUNDING


def _attention(target: object, arguments: Sequence[Any], named: Mapping[str, Any]) -> Attention:
    first = 0 if target is _FORWARD else 1  # backward's first argument is the gradient of the result
    query, key = (_value(argument) for argument in arguments[first : first + 2])
    flag = 4 if target is _FORWARD else 7
    is_causal = bool(arguments[flag]) if len(arguments) > flag else bool(named.get("is_causal", False))
    batch, heads, queries, width = (size_expr(size) for size in query.shape)
    return Attention(
        batch, heads, size_expr(key.shape[1]), queries, size_expr(key.shape[2]), width, query.dtype, is_causal
    )


def _copied_gradient(argument: Any) -> sympy.Expr:
    """Bytes of the gradient's copy, unless it lies as [B,S,H,D]."""
    gradient = _value(argument).transpose(1, 2)
    sizes, strides = ([size_expr(length) for length in lengths] for lengths in (gradient.shape, gradient.stride()))
    return sympy.S.Zero if is_contiguous(sizes, strides) else sympy.prod(sizes) * gradient.dtype.itemsize


def _unpacked(arguments: Sequence[Any]) -> sympy.Expr:
    """Bytes of the weight of `linear_4bit` in its rows' dtype, and of its scales as floats where they are bytes."""
    rows, scales, num_out = _value(arguments[0]), arguments[2], arguments[5]
    weight = size_expr(num_out) * size_expr(rows.shape[-1]) * rows.dtype.itemsize
    return weight if len(scales) == 1 else weight + _FLOAT_BYTES * size_expr(_value(scales[0]).numel())


def product_scratch(product: Product) -> sympy.Expr:
    """Bytes that one product takes on this machine's CPU, in its symbols, for the threads that run now."""
    threads = torch.get_num_threads()
    counted = blocks_of(product, cpu_features(), threads)
    if counted == 0:
        return counted
    excess = _excess("gradient" if product.is_by_column else "rows", product.dtype, threads)
    return _with_excess(counted, product.input_bytes, excess)


def gradient_scratch(shapes: Iterable[Sequence[int]], dtype: torch.dtype, device_type: str) -> sympy.Expr:
    """Bytes in R of oneDNN's blocks of a low-precision product [a,R] @ [R,b] on a CPU; 0 elsewhere.

    Each counts as [b,R] @ [R,a] too, which ATen makes of it where the gradient lies column by column.

    Args:
        shapes: of the gradients, [a,b]; others have no product.
        dtype: of the factors; in fp32 it is not oneDNN that multiplies.
        device_type: "cpu" or "cuda".
    """
    sides = {(int(shape[0]), int(shape[1])) for shape in shapes if len(shape) == 2}
    products = frozenset(sides | {(right, left) for left, right in sides})
    if device_type != "cpu" or dtype.itemsize >= 4 or not products:
        return sympy.Integer(0)
    inputs = dtype.itemsize * max(map(sum, products)) * ROWS
    threads = torch.get_num_threads()
    excess = _excess("gradient", dtype, threads)
    return _with_excess(gradient_blocks(products, dtype, cpu_features(), threads), inputs, excess)


def _with_excess(counted: sympy.Expr, inputs: sympy.Expr, excess: Excess) -> sympy.Expr:
    if excess.shape is None:
        return counted
    more = sympy.Rational(excess.factor).limit_denominator(1000) + sympy.Rational(1, 1000)
    return sympy.ceiling(more * counted + sympy.Rational(excess.per_input_byte) * inputs)


@functools.lru_cache(maxsize=64)
def _excess(kernel: Kernel, dtype: torch.dtype, threads: int) -> Excess:
    """Return by how much this machine's kernel exceeds its formula; warn of the first excess in a process."""
    measured = measured_scratch(kernel, dtype)
    if measured is None:
        return Excess()
    shapes = shapes_of(kernel)
    counted = [counted_at(kernel, shape, dtype, threads) for shape in shapes]
    excess = excess_of(measured, counted, [input_bytes(shape, dtype) for shape in shapes], shapes)
    if excess.shape is not None:
        place = shapes.index(excess.shape)
        _warn_of(kernel, dtype, excess.shape, measured[place], counted[place])
    return excess


def counted_at(kernel: Kernel, shape: Shape, dtype: torch.dtype, threads: int) -> int:
    """The formula at a shape of the probe."""
    if shapes_of(kernel) is PRODUCT_SHAPES and dtype.itemsize >= 4:
        return 0
    if kernel == "rows":
        left, right, inner = map(sympy.Integer, shape)
        return int(blocks_of(Product(left, inner, right, sympy.S.One, False, dtype), cpu_features(), threads))
    if kernel == "gradient":
        return int(
            gradient_blocks(frozenset([(shape[0], shape[1])]), dtype, cpu_features(), threads).subs(ROWS, shape[2])
        )
    heads, queries, keys, width = map(sympy.Integer, shape)
    call = Attention(sympy.Integer(1), heads * threads, heads * threads, queries, keys, width, dtype, is_causal=True)
    count = forward_scratch if kernel == "forward" else backward_scratch
    return int(count(call, cpu_features(), threads))


_warned = False


def _warn_of(kernel: Kernel, dtype: torch.dtype, shape: Shape, measured: int, counted: int) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    what = {"gradient": "a gradient's product", "rows": "a product"}.get(kernel, f"attention's {kernel}")
    warnings.warn(
        f"{what} in {dtype} takes {readable_bytes(measured)} of scratch at {shape} on this CPU, where "
        f"{readable_bytes(counted)} are counted; "
        "budgets count what was measured, enlarged in proportion",
        stacklevel=2,
    )


def _input_bytes(call: Attention) -> sympy.Expr:
    query = call.heads * call.queries
    return call.dtype.itemsize * call.batch * call.width * (query + 2 * call.key_heads * call.keys)


def _rounded_up(length: sympy.Expr, step: int) -> sympy.Expr:
    return step * sympy.ceiling(length / step)


def _value(argument: Any) -> torch.Tensor:
    value: torch.Tensor = argument.meta["val"]
    return value
