"""Low-rank terms of a weight, factor by factor: the same function and gradients, and only where it pays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from memfine_fx.passes.lower.low_rank import split_low_rank
from memfine_fx.passes.tracing import TensorSpec, TracedFunction, trace_rows

HIDDEN, WIDTH, RANK = 48, 80, 2
Function = Callable[..., Tensor]


def adapted(rows: Tensor, base: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return rows @ (base + (b @ a) * 0.5).t()


def adapted_twice(rows: Tensor, base: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return rows @ (b @ a + base + 2 * (b.relu() @ a)).t()


def with_ones_in_front(rows: Tensor, base: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return rows @ (base.unsqueeze(0) + (b @ a).unsqueeze(0)).transpose(1, 2).select(0, 0)


def scaled_as_a_sum(rows: Tensor, base: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return rows @ ((base + (b @ a) * 0.5) * 3).t()


def turned_product(rows: Tensor, base: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return rows @ (base.t() + a.t() @ b.t())


def scaled_by_a_tensor(rows: Tensor, base: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return rows @ (base + (b @ a) * base.new_full((), 0.25)).permute(1, 0)


def no_sum(rows: Tensor, base: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return rows @ (b @ a).t() + rows @ base.t()


def magnitude_in_between(rows: Tensor, base: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return rows @ ((base + b @ a) * base.norm(dim=1, keepdim=True)).t()


def trace(function: Function, rank: int = RANK, dtype: torch.dtype = torch.float32) -> TracedFunction:
    cpu = torch.device("cpu")
    shapes = [(WIDTH, HIDDEN), (WIDTH, rank), (rank, HIDDEN)]
    dtypes = [dtype, torch.float32, torch.float32]
    params = [TensorSpec(shape, one, cpu) for shape, one in zip(shapes, dtypes, strict=True)]
    return trace_rows(function, (TensorSpec((HIDDEN,), dtype, cpu, per_row=True), *params))


def arguments(rank: int = RANK) -> list[Tensor]:
    shapes = [(7, HIDDEN), (WIDTH, HIDDEN), (WIDTH, rank), (rank, HIDDEN)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("function", [adapted, adapted_twice, with_ones_in_front, turned_product, scaled_by_a_tensor])
def test_factors_meet_rows_one_after_the_other(function: Function) -> None:
    traced = trace(function)
    assert split_low_rank(traced.graph_module) == 1
    sums = [node for node in traced.graph_module.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert all(tuple(node.meta["val"].shape)[1:] == (WIDTH,) for node in sums), "sums are of rows, not of matrices"
    scaled = [node for node in traced.graph_module.graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert all(tuple(node.meta["val"].shape)[1:] == (RANK,) for node in scaled), "numbers meet the narrow product"
    inputs = arguments()
    ours, exact = traced.graph_module(*inputs), function(*inputs)
    torch.testing.assert_close(ours, exact)
    gradient = torch.randn_like(exact)
    theirs = torch.autograd.grad(exact, inputs, gradient, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, gradient), theirs)


def test_a_sum_that_is_scaled_scales_all_its_terms() -> None:
    traced = trace(scaled_as_a_sum)
    assert split_low_rank(traced.graph_module) == 1
    inputs = arguments()
    torch.testing.assert_close(traced.graph_module(*inputs), scaled_as_a_sum(*inputs))


@pytest.mark.parametrize("function", [no_sum, magnitude_in_between])
def test_other_functions_stay(function: Function) -> None:
    traced = trace(function)
    before = traced.graph_module.code
    assert split_low_rank(traced.graph_module) == 0
    assert traced.graph_module.code == before


def test_a_high_rank_stays_a_sum() -> None:
    """4 r (H + F) <= H F: 7 columns pay here, 8 do not."""
    assert split_low_rank(trace(adapted, rank=7).graph_module) == 1
    assert split_low_rank(trace(adapted, rank=8).graph_module) == 0


def test_factors_take_the_rows_dtype() -> None:
    traced = trace(adapted, dtype=torch.bfloat16)
    assert split_low_rank(traced.graph_module) == 1
    products = [node for node in traced.graph_module.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) == 3 and all(node.meta["val"].dtype is torch.bfloat16 for node in products)
