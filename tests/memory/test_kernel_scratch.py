"""Scratch of attention and product kernels, in symbols, against what the allocator sees."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memfine_fx.memory.kernel_scratch import product_scratch, scratch_bytes
from memfine_fx.memory.measure import trace_memory
from memfine_fx.memory.symbols import ROWS

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

PACKED_BYTES = 1 << 18
"""What the bound on oneDNN's part in bf16 may be too large by, a thread."""


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, sums = FORWARD(query, key, value, 0.0, True)
    return (out, sums, *BACKWARD(out, query, key, value, out, sums, 0.0, True))


def drawn(queries: int, keys: int, head: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(1, length, 2, head, dtype=dtype).transpose(1, 2) for length in (queries, keys, keys)]


def counted(graph: fx.Graph, target: object, sizes: dict[str, int]) -> int:
    (node,) = graph.find_nodes(op="call_function", target=target)
    expr = scratch_bytes(node)
    return int(expr.subs({symbol: sizes[str(symbol)] for symbol in expr.free_symbols}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys", "head", "mode"),
    [(800, 800, 64, "real"), (1024, 300, 48, "symbolic"), (300, 600, 128, "symbolic"), (24, 40, 192, "symbolic")],
)
def test_scratch_is_what_the_allocator_sees(queries: int, keys: int, head: int, dtype: torch.dtype, mode: str) -> None:
    inputs = drawn(queries, keys, head, dtype)
    graph = make_fx(attention, tracing_mode=mode)(*inputs).graph
    sizes: dict[str, int] = {}
    for node, tensor in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        sizes |= {str(symbol): size for symbol, size in zip(node.meta["val"].shape, tensor.shape, strict=True)}
    out, sums = FORWARD(*inputs, 0.0, True)
    for target, call in (
        (FORWARD, lambda: FORWARD(*inputs, 0.0, True)),
        (BACKWARD, lambda: BACKWARD(out, *inputs, out, sums, 0.0, True)),
    ):
        results = sum(one.untyped_storage().nbytes() for one in call())
        measured = trace_memory(call, torch.device("cpu")).peak_bytes - results
        most_packed = 0 if dtype is torch.float32 or target is FORWARD else PACKED_BYTES * torch.get_num_threads()
        assert 0 < measured <= counted(graph, target, sizes) <= 1.02 * measured + most_packed


@pytest.mark.parametrize("rows", [97, 539, 1500])
@pytest.mark.parametrize(("width", "hidden"), [(512, 256), (192, 320)])
def test_scratch_of_a_gradients_product_is_no_more_than_is_counted(width: int, hidden: int, rows: int) -> None:
    left, right = torch.randn(rows, width).bfloat16().t(), torch.randn(rows, hidden).bfloat16()
    out = torch.empty(width, hidden, dtype=torch.bfloat16)
    torch.mm(left, right, out=out)
    measured = trace_memory(lambda: torch.mm(left, right, out=out), torch.device("cpu")).peak_bytes
    assert measured <= product_scratch([(width, hidden), (7,)], 2, "cpu").subs(ROWS, rows)


def test_products_elsewhere_need_none() -> None:
    assert (
        product_scratch([(8, 8)], 4, "cpu")
        == product_scratch([(8, 8)], 2, "cuda")
        == product_scratch([], 2, "cpu")
        == 0
    )


def test_other_operations_need_none() -> None:
    graph = make_fx(torch.add)(torch.ones(2), torch.ones(2)).graph
    assert all(scratch_bytes(node) == 0 for node in graph.nodes)
