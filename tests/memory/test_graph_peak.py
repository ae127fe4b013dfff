"""Live bytes of small graphs against hand-counted buffers, in rows R of fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from memfine_fx.memory.graph_peak import live_peaks, peak_bytes_at, read_graph
from memfine_fx.memory.liveness import CountedInputs
from memfine_fx.passes.tracing import TensorSpec, trace_rows

SIDE = 8
ROW_BYTES = 4 * SIDE
"""Bytes of one row of one [R,SIDE] fp32 buffer."""


def buffers(function: Callable[[Tensor, Tensor], Any], *, is_fused: bool, num_rows: int = SIDE) -> float:
    """Peak of `function(x [R,SIDE], w [SIDE,SIDE])` in [R,SIDE] buffers."""
    traced = trace_rows(
        function,
        [
            TensorSpec((SIDE,), torch.float32, torch.device("cpu"), per_row=True),
            TensorSpec((SIDE, SIDE), torch.float32, torch.device("cpu")),
        ],
    )
    peaks = live_peaks(traced.graph_module.graph, is_fused=is_fused)
    return peak_bytes_at(peaks, {traced.rows: num_rows}) / (ROW_BYTES * num_rows)


def chain(x: Tensor, w: Tensor) -> Tensor:
    return x @ w @ w @ w @ w


def viewed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    view = (x @ w).t()
    other = x @ w @ w
    return other, view @ x


def pointwise_then_matmul(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(torch.sigmoid(x) + 1) @ w


def pointwise_into_reduction(x: Tensor, w: Tensor) -> Tensor:
    return torch.exp(torch.sigmoid(x)).sum(1)


def pointwise_result(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(torch.sigmoid(x @ w))


def late_fused_reader(x: Tensor, w: Tensor) -> Tensor:
    first = x @ w
    fused = torch.sigmoid(first)
    second = x @ w
    third = second @ w
    return fused * third


def split_parts(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    left, right = (x @ w).split(SIDE // 2, dim=1)
    return left @ w[: SIDE // 2], right @ w[SIDE // 2 :]


def rotated(x: Tensor, w: Tensor) -> Tensor:
    pairs = torch.view_as_complex(torch.sigmoid(x).view(-1, SIDE // 2, 2))
    return torch.relu(torch.view_as_real(pairs * pairs).view(-1, SIDE))


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(
    ("function", "num_buffers"),
    [
        pytest.param(lambda x, w: x @ w, 1, id="one result"),
        pytest.param(lambda x, w: (x @ w, x @ w.t()), 2, id="two results"),
        pytest.param(chain, 2, id="freed after the last use"),
        pytest.param(viewed, 3, id="a view keeps its storage alive"),
        pytest.param(split_parts, 3, id="parts share one storage"),
        pytest.param(lambda x, w: (x @ w).view(-1, 2, SIDE // 2).transpose(0, 1), 1, id="views own nothing"),
        pytest.param(rotated, 2, id="complex numbers are views of real ones, and nothing is fused with their product"),
        pytest.param(lambda x, w: (x.t(), w.t()), 0, id="arguments and their views count nothing"),
    ],
)
def test_buffers_live_from_their_producer_to_their_last_reader(
    function: Callable[..., Any], num_buffers: int, is_fused: bool
) -> None:
    assert buffers(function, is_fused=is_fused) == num_buffers


@pytest.mark.parametrize(
    ("function", "fused", "unfused"),
    [
        pytest.param(pointwise_then_matmul, 2, 2, id="what a matmul reads is a buffer"),
        pytest.param(pointwise_into_reduction, 1 / SIDE, 2, id="what a reduction reads is not"),
        pytest.param(pointwise_result, 2, 2, id="a result is a buffer"),
        pytest.param(late_fused_reader, 3, 3, id="a fused chain keeps its source"),
    ],
)
def test_fusion_removes_pointwise_chains_only(function: Callable[..., Any], fused: float, unfused: float) -> None:
    assert buffers(function, is_fused=True) == pytest.approx(fused)
    assert buffers(function, is_fused=False) == pytest.approx(unfused)


def test_a_fused_chain_of_three_is_one_buffer() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(torch.sigmoid(x) * torch.tanh(x) + 1)

    assert buffers(function, is_fused=True) == 1
    assert buffers(function, is_fused=False) == 3


@pytest.mark.parametrize("num_rows", [1, 7, 1000])
def test_sizes_are_evaluated_at_the_given_rows(num_rows: int) -> None:
    assert buffers(chain, is_fused=True, num_rows=num_rows) == 2


def test_each_program_point_has_its_own_expression() -> None:
    traced = trace_rows(
        lambda x, w: (x @ w.t() @ w).t() @ x,
        [
            TensorSpec((SIDE,), torch.float32, torch.device("cpu"), per_row=True),
            TensorSpec((3, SIDE), torch.float32, torch.device("cpu")),
        ],
    )
    rows = traced.rows
    expected = [12 * rows, 12 * rows + 32 * rows, 32 * rows + 4 * SIDE * SIDE]
    assert live_peaks(traced.graph_module.graph, is_fused=True) == [sympy.expand(peak) for peak in expected]


def test_an_element_costs_what_its_dtype_says() -> None:
    traced = trace_rows(
        lambda x: (x.to(torch.bfloat16), x.to(torch.float64)),
        [TensorSpec((SIDE,), torch.float32, torch.device("cpu"), per_row=True)],
    )
    assert peak_bytes_at(live_peaks(traced.graph_module.graph, is_fused=False), {traced.rows: 3}) == 3 * SIDE * (2 + 8)


def test_a_graph_that_allocates_nothing_peaks_at_zero() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    assert live_peaks(graph, is_fused=False) == []
    assert peak_bytes_at([], {}) == 0


def test_every_result_of_a_call_with_several_is_counted() -> None:
    traced = make_fx(lambda x: torch.ops.aten.max.dim(x, 1), tracing_mode="fake")(torch.randn(6, SIDE))
    assert peak_bytes_at(live_peaks(traced.graph, is_fused=False), {}) == 6 * (4 + 8)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, [0, 0, 64, 128, 64]),
        (CountedInputs(freed=("saved", "tangents_1")), [128, 128, 192, 192, 64]),
        (CountedInputs(freed=("saved",), held=("tangents_1",)), [128, 128, 192, 256, 128]),
    ],
    ids=["the caller's", "freed", "held"],
)
def test_inputs_that_count_are_alive_from_the_start_and_those_that_are_held_to_the_end(
    inputs: CountedInputs | None, expected: list[int]
) -> None:
    graph = fx.Graph()
    saved, tangent = graph.placeholder("saved"), graph.placeholder("tangents_1")
    product = graph.call_function(torch.ops.aten.mm.default, (tangent, saved))
    gradient = graph.call_function(torch.ops.aten.mm.default, (product, saved))
    graph.output((gradient,))
    for node in (saved, tangent, product, gradient):
        node.meta["val"] = torch.empty(4, 4)
    memory = read_graph(graph, is_fused=False, inputs=inputs)
    assert memory.live_bytes({}, lambda call: 0) == expected


def test_parts_of_a_split_keep_what_was_split() -> None:
    traced = make_fx(split_parts, tracing_mode="fake")(torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE))
    memory = read_graph(traced.graph, is_fused=False)
    assert max(memory.live_bytes({}, lambda call: 0)) == 3 * SIDE * ROW_BYTES, "what was split, and two products"
