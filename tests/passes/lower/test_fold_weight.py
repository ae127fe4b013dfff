"""Moving the routing weight before the last projection: the text before and after, and equal gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from memfine_fx.passes.lower.fold_weight import fold_weight
from memfine_fx.passes.tracing import TracedFunction, trace_rows
from tests.helpers import HIDDEN, WIDTH, code_of, largest_error, mlp, specs_for

KINDS = ("expert", "expert", "expert")


def tables(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """up, down and bias of one expert, with the leading E = 1 that specs leave out."""
    shapes = [(1, HIDDEN, WIDTH), (1, WIDTH, HIDDEN), (1, HIDDEN)]
    return [torch.randn(shape).div(3).to(dtype) for shape in shapes]


def with_bias(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return (torch.relu(rows @ up) @ down + bias) * weight.unsqueeze(1)


def weight_first(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return weight.unsqueeze(1) * (bias.unsqueeze(0) + torch.relu(rows @ up) @ down)


def cast_to_fp32(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return (torch.relu(rows @ up) @ down + bias).float() * weight.float().unsqueeze(1)


def cast_after(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """As autocast leaves it, which sums over a token's experts in fp32."""
    return ((torch.relu(rows @ up) @ down + bias) * weight.unsqueeze(1)).float()


def weight_on_input(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return torch.relu((rows * weight.unsqueeze(1)) @ up) @ down + bias


def activation_last(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.relu(rows @ up) @ down + bias) * weight.unsqueeze(1)


def residual(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return (rows + torch.relu(rows @ up) @ down) * weight.unsqueeze(1)


def scaled_bias(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return torch.add(torch.relu(rows @ up) @ down, bias, alpha=2) * weight.unsqueeze(1)


def another_factor(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return (torch.relu(rows @ up) @ down) * bias


def added_weight(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(rows @ up) @ down + weight.unsqueeze(1)


def trace(function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> TracedFunction:
    params = tables(dtype)[: 2 if function is mlp else 3]
    return trace_rows(function, specs_for(params, KINDS[: len(params)], has_weight=True, dtype=dtype))


def weight_of(graph_module: fx.GraphModule) -> fx.Node:
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"][1]


def fold(graph_module: fx.GraphModule) -> bool:
    return fold_weight(graph_module, weight_of(graph_module))


def values_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad(out, leaves, probe, allow_unused=True)
    return [out, *(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True))]


def inputs_for(function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    params = [table[0] for table in tables(dtype)][: 2 if function is mlp else 3]
    return [torch.randn(9, HIDDEN).to(dtype), torch.rand(9).to(dtype), *params]


def test_the_weight_moves_before_the_last_projection() -> None:
    graph_module = trace(mlp).graph_module
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
    rows, weight, up, down = names
    assert code_of(graph_module) == [
        f"mm = torch.ops.aten.mm.default({rows}, {up})",
        "relu = torch.ops.aten.relu.default(mm)",
        f"mm_1 = torch.ops.aten.mm.default(relu, {down})",
        f"unsqueeze = torch.ops.aten.unsqueeze.default({weight}, 1)",
        "mul = torch.ops.aten.mul.Tensor(mm_1, unsqueeze)",
        "return mul",
    ]
    assert fold(graph_module)
    assert code_of(graph_module) == [
        f"mm = torch.ops.aten.mm.default({rows}, {up})",
        "relu = torch.ops.aten.relu.default(mm)",
        f"unsqueeze = torch.ops.aten.unsqueeze.default({weight}, 1)",
        "mul_tensor = torch.ops.aten.mul.Tensor(relu, unsqueeze)",
        f"mm_default = torch.ops.aten.mm.default(mul_tensor, {down})",
        "return mm_default",
    ]


def test_a_bias_is_scaled_by_the_weight() -> None:
    graph_module = trace(with_bias).graph_module
    bias = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"][4]
    assert fold(graph_module)
    assert code_of(graph_module)[-3:] == [
        f"mul_tensor_1 = torch.ops.aten.mul.Tensor({bias}, unsqueeze)",
        "add_tensor = torch.ops.aten.add.Tensor(mm_default, mul_tensor_1)",
        "return add_tensor",
    ]


@pytest.mark.parametrize("function", [mlp, with_bias, weight_first, cast_to_fp32, cast_after])
def test_folding_keeps_values_and_gradients(function: Callable[..., Tensor]) -> None:
    graph_module = trace(function).graph_module
    assert fold(graph_module)
    inputs = inputs_for(function)
    for got, expected in zip(
        values_and_gradients(graph_module, inputs), values_and_gradients(function, inputs), strict=True
    ):
        assert largest_error(got, expected) < 1e-5


@pytest.mark.parametrize("function", [mlp, with_bias, cast_to_fp32, cast_after])
def test_folding_in_bf16_is_as_accurate_and_keeps_the_dtype(function: Callable[..., Tensor]) -> None:
    graph_module = trace(function, torch.bfloat16).graph_module
    assert fold(graph_module)
    inputs = inputs_for(function, torch.bfloat16)
    exact = function(*(tensor.double() for tensor in inputs))
    got, eager = graph_module(*inputs), function(*inputs)
    assert got.dtype == eager.dtype
    assert (got.double() - exact).norm() <= 1.5 * (eager.double() - exact).norm()


@pytest.mark.parametrize(
    "function", [weight_on_input, activation_last, residual, scaled_bias, another_factor, added_weight]
)
def test_what_does_not_match_is_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module = trace(function).graph_module
    before = graph_module.code
    assert not fold(graph_module)
    assert graph_module.code == before


def test_folding_twice_changes_nothing() -> None:
    graph_module = trace(with_bias).graph_module
    assert fold(graph_module)
    before = graph_module.code
    assert not fold(graph_module)
    assert graph_module.code == before


def test_a_folded_graph_is_valid_and_knows_its_shapes() -> None:
    graph_module = trace(cast_to_fp32, torch.bfloat16).graph_module
    assert fold(graph_module)
    graph_module.graph.lint()
    assert all("val" in node.meta for node in graph_module.graph.nodes if node.op != "output")
