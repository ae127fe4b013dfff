"""Forward and backward bodies: shared by content, gradients peeled to products, nothing computed unasked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from memfine_fx.memory.sizes import ROWS
from memfine_fx.passes.lower.compiled_expert import CompiledExpertFunction
from memfine_fx.passes.lower.compiled_function import num_compilations
from memfine_fx.runtime.compiled_expert import CompiledBackward, Operand, Product
from tests.helpers import (
    HIDDEN,
    NUM_EXPERTS,
    WIDTH,
    compiled_expert_of,
    expert_function,
    largest_error,
    mlp,
    mlp_params,
    specs_for,
)

KINDS = ("expert", "expert")
ALL = (True, True, True, True)


def tanh_mlp(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.tanh(rows @ up) @ down) * weight.unsqueeze(1)


def linears(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.relu(rows @ up.t()) @ down.t()) * weight.unsqueeze(1)


def scaled(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.relu(rows @ (up * 2)) @ down) * weight.unsqueeze(1)


def unused(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (rows @ up @ up.t()) * weight.unsqueeze(1)


def call_arguments(num_rows: int = 7) -> list[Tensor]:
    return [torch.randn(num_rows, HIDDEN), torch.rand(num_rows), *(param[0] for param in mlp_params())]


def graph_of(body: CompiledBackward) -> fx.Graph:
    graph: fx.Graph = body.call.graph_module.graph  # type: ignore[attr-defined]  # uncompiled
    return graph


def targets(body: CompiledBackward) -> list[str]:
    return [str(node.target) for node in graph_of(body).nodes if node.op == "call_function"]


def gradients(
    compiled_expert: CompiledExpertFunction, wanted: tuple[bool, ...], grad: Tensor, args: list[Tensor]
) -> list[Tensor | None]:
    """rows, weight, then parameters, products multiplied out."""
    body = compiled_expert.backward(wanted)
    full = [grad, *args]
    results = body.call(*full)
    found: list[Tensor | None] = [None if at is None else results[at] for at in (body.rows_grad, body.weight_grad)]
    for how in body.param_grads:
        if isinstance(how, Product):
            found.append(how.left.value(full, results) @ how.right.value(full, results))
        else:
            found.append(None if how is None else results[how])
    return found


def test_equal_functions_on_equal_tensors_share_their_bodies() -> None:
    first, second = compiled_expert_of(mlp, mlp_params(), KINDS), compiled_expert_of(mlp, mlp_params(), KINDS)
    assert first is second


def test_the_number_of_experts_is_not_part_of_a_body() -> None:
    more = [torch.cat([param, param]) for param in mlp_params()]
    assert compiled_expert_of(mlp, more, KINDS) is compiled_expert_of(mlp, mlp_params(), KINDS)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: compiled_expert_of(tanh_mlp, mlp_params(), KINDS), id="another function"),
        pytest.param(lambda: compiled_expert_of(mlp, mlp_params(torch.bfloat16), KINDS), id="another dtype"),
        pytest.param(
            lambda: compiled_expert_of(
                mlp, [p.transpose(1, 2).contiguous().transpose(1, 2) for p in mlp_params()], KINDS
            ),
            id="other strides",
        ),
        pytest.param(lambda: compiled_expert_of(mlp, mlp_params(), KINDS, folds_weight=False), id="not folded"),
        pytest.param(lambda: compiled_expert_of(mlp, mlp_params(), ("shared", "expert")), id="another kind"),
    ],
)
def test_bodies_that_differ_have_keys_that_differ(other: Callable[[], CompiledExpertFunction]) -> None:
    assert other().key != compiled_expert_of(mlp, mlp_params(), KINDS).key


def test_compilations_grow_with_distinct_bodies_only() -> None:
    def distinct(rows: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (torch.relu(rows @ up - 0.125) @ down) * weight.unsqueeze(1)

    args, before = call_arguments(), num_compilations()
    for _ in range(3):
        compiled_expert = compiled_expert_of(distinct, mlp_params(), KINDS)
        for num_rows in (7, 1, 30):
            args = call_arguments(num_rows)
            compiled_expert.forward()(*args)
            compiled_expert.backward(ALL).call(torch.randn(num_rows, HIDDEN), *args)
    assert num_compilations() == before + 2


def test_a_body_that_is_never_called_is_never_compiled() -> None:
    before = num_compilations()
    compiled_expert_of(mlp, mlp_params(), KINDS).backward((True, True, False, False))
    assert num_compilations() == before


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7])
def test_the_forward_is_the_function(num_rows: int) -> None:
    args = call_arguments(num_rows)
    (got,) = compiled_expert_of(mlp, mlp_params(), KINDS).forward()(*args)
    assert largest_error(got, mlp(*args)) < 1e-5


@pytest.mark.parametrize("function", [mlp, tanh_mlp, scaled, unused])
@pytest.mark.parametrize("folds_weight", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_the_backward_has_the_gradients_of_autograd(
    function: Callable[..., Tensor], folds_weight: bool, num_rows: int
) -> None:
    args, grad = call_arguments(num_rows), torch.randn(num_rows, HIDDEN)
    leaves = [arg.clone().requires_grad_() for arg in args]
    expected = torch.autograd.grad(function(*leaves), leaves, grad, allow_unused=True)
    compiled_expert = compiled_expert_of(function, mlp_params(), KINDS, folds_weight=folds_weight)
    for got, truth, leaf in zip(gradients(compiled_expert, ALL, grad, args), expected, leaves, strict=True):
        assert got is not None
        assert largest_error(got, torch.zeros_like(leaf) if truth is None else truth) < 1e-5


def test_weight_gradients_are_peeled_to_their_two_factors() -> None:
    body = compiled_expert_of(mlp, mlp_params(), KINDS).backward(ALL)
    assert all(isinstance(how, Product) for how in body.param_grads)
    assert targets(body).count("aten.mm.default") == 3


def test_a_factor_that_is_an_argument_is_not_returned() -> None:
    up = compiled_expert_of(mlp, mlp_params(), KINDS).backward(ALL).param_grads[0]
    assert isinstance(up, Product)
    assert up.left == Operand(is_argument=True, index=1, is_transposed=True)


@pytest.mark.parametrize("is_strided", [True, False])
def test_a_transposed_parameter_has_its_product_transposed(is_strided: bool) -> None:
    params = [param.transpose(1, 2) for param in mlp_params()]
    params = params if is_strided else [param.contiguous() for param in params]
    compiled_expert = compiled_expert_of(linears, params, KINDS)
    args = [torch.randn(7, HIDDEN), torch.rand(7), *(param[0] for param in params)]
    leaves = [arg.clone().requires_grad_() for arg in args]
    grad = torch.randn(7, HIDDEN)
    expected = torch.autograd.grad(linears(*leaves), leaves, grad)
    got = gradients(compiled_expert, ALL, grad, args)
    assert all(isinstance(how, Product) for how in compiled_expert.backward(ALL).param_grads)
    assert [one.shape for one in got if one is not None] == [leaf.shape for leaf in leaves]
    assert all(largest_error(one, truth) < 1e-5 for one, truth in zip(got, expected, strict=True) if one is not None)


def test_a_gradient_that_is_no_product_is_returned_plain() -> None:
    body = compiled_expert_of(scaled, mlp_params(), KINDS).backward(ALL)
    assert isinstance(body.param_grads[0], int)
    assert isinstance(body.param_grads[1], Product)


def with_bias(rows: Tensor, weight: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    return (rows @ up + bias) * weight.unsqueeze(1)


def test_a_sum_in_low_precision_is_cut_out_under_another_mode_too() -> None:
    """`fit` compiles in a mode of its own; a bias's gradient is such a sum."""
    up = mlp_params(torch.bfloat16)[0]
    compiled_expert = compiled_expert_of(with_bias, [up, torch.randn(NUM_EXPERTS, up.shape[-1]).to(up.dtype)], KINDS)
    with FakeTensorMode():
        body = compiled_expert.backward(ALL)
    assert isinstance(body.param_grads[1], int)
    totals = [node for node in graph_of(body).nodes if node.target is torch.ops.aten.sum.dim_IntList]
    assert torch.float32 in [total.meta["val"].dtype for total in totals]


@pytest.mark.parametrize(
    ("wanted", "num_matmuls"),
    [
        ((True, True, False, False), 3),
        ((True, False, False, False), 3),
        ((False, False, True, True), 2),
        ((False, False, False, True), 1),
        ((False, True, False, False), 2),
    ],
)
def test_frozen_inputs_cost_no_matmul(wanted: tuple[bool, ...], num_matmuls: int) -> None:
    body = compiled_expert_of(mlp, mlp_params(), KINDS).backward(wanted)
    assert (body.rows_grad is not None, body.weight_grad is not None) == wanted[:2]
    assert tuple(how is not None for how in body.param_grads) == wanted[2:]
    assert targets(body).count("aten.mm.default") == num_matmuls


def test_folding_drops_the_last_projection_from_the_backward() -> None:
    folded = compiled_expert_of(mlp, mlp_params(), KINDS)
    plain = compiled_expert_of(mlp, mlp_params(), KINDS, folds_weight=False)
    assert (folded.is_folded, plain.is_folded) == (True, False)
    matmuls = [targets(compiled_expert.backward(ALL)).count("aten.mm.default") for compiled_expert in (folded, plain)]
    assert matmuls == [3, 4]


def test_the_forward_peak_is_in_rows() -> None:
    peak = compiled_expert_of(tanh_mlp, mlp_params(), KINDS, folds_weight=False).forward().peak_bytes
    assert sympy.simplify(peak - 4 * ROWS * 2 * WIDTH) == 0


def test_a_body_says_what_it_returns() -> None:
    compiled_expert = compiled_expert_of(mlp, mlp_params(torch.bfloat16), KINDS)
    assert (compiled_expert.out_width, compiled_expert.contribution_dtype, compiled_expert.has_weight) == (
        HIDDEN,
        torch.bfloat16,
        True,
    )
    assert mlp_params()[0].shape[0] == NUM_EXPERTS


def inductor_expert(function: Callable[..., Tensor]) -> CompiledExpertFunction:
    """Made anew, which no other test has compiled."""
    params = mlp_params()
    specs = specs_for(params, KINDS, has_weight=True, hidden=HIDDEN, dtype=params[0].dtype)
    expert_fn = expert_function(function, has_weight=True, kinds=KINDS)
    return CompiledExpertFunction("anew", expert_fn, tuple(specs), True, False, "inductor")


def test_what_bodies_would_hold_is_read_without_building_any() -> None:
    compiled_expert, before = inductor_expert(tanh_mlp), num_compilations()
    backward = compiled_expert.backward(ALL)
    compiled_expert.read_code()
    assert compiled_expert.revision == 1
    assert num_compilations() == before
    assert backward.peak_bytes.free_symbols == {ROWS}
    compiled_expert.read_code()
    assert compiled_expert.revision == 1, "what was read once is not read again"


@pytest.mark.slow
def test_what_is_read_without_building_is_what_the_compiled_body_holds() -> None:
    read, compiled = (inductor_expert(mlp) for _ in range(2))
    read.backward(ALL)
    read.read_code()
    for _ in range(2):  # the second time from caches on disk
        backward = compiled.backward(ALL)
        backward.call(torch.randn(7, HIDDEN), *call_arguments())
        assert compiled.revision == 1
        assert backward.peak_bytes == read.backward(ALL).peak_bytes
        compiled = inductor_expert(mlp)
