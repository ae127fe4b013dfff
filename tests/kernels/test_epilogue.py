"""Activations as Triton source, run here with torch in the place of Triton: values and gradients are autograd's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from memfine_fx.kernels.epilogue import written


def _maximum(left: Any, right: Any, propagate_nan: str) -> Tensor:
    assert propagate_nan == "all"
    return torch.maximum(*map(torch.as_tensor, (left, right)))


def _minimum(left: Any, right: Any, propagate_nan: str) -> Tensor:
    return -_maximum(-torch.as_tensor(left), -torch.as_tensor(right), propagate_nan)


TORCH_AS_TRITON = SimpleNamespace(
    PropagateNan=SimpleNamespace(ALL="all"),
    maximum=_maximum,
    minimum=_minimum,
    where=torch.where,
    float32=torch.float32,
    **{name: getattr(torch, name) for name in ("abs", "erf", "exp", "log", "sigmoid", "sqrt", "zeros_like")},
)

OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "clamped": lambda gate, up: functional.silu(gate.clamp(max=0.5)) * (up.clamp(-0.5, 0.5) + 1),
    "bounds by name": lambda gate, up: gate.clamp_min(-0.5).minimum(up) + torch.maximum(gate, up).clamp_max(0.5),
    "quotient": lambda gate, up: gate / (1 + up.abs()) - up.neg(),
    "where": lambda gate, up: torch.where(gate > up, gate * 2, up.square()),
    "both conditions": lambda gate, up: torch.where((gate > 0) & (up <= 0.5), gate, up),
    "mask": lambda gate, up: (gate >= up).float() * gate + (gate < 0.25).float() * up,
    "roots": lambda gate, up: (gate * gate + 1).sqrt() * (up * up + 1).rsqrt() + (gate.abs() + 0.5).log(),
    "powers": lambda gate, up: gate.pow(3) + (up.abs() + 1).pow(0.5) - (gate.exp() + 1).reciprocal(),
    "up alone has a gradient": lambda gate, up: gate.detach() * up,
}
OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "relu2": lambda one: functional.relu(one).square(),
    "gelu": functional.gelu,
    "gelu by tanh": lambda one: functional.gelu(one, approximate="tanh"),
    "tanh": torch.tanh,
    "leaky": lambda one: functional.leaky_relu(one, 0.2),
    "leaky by default": lambda one: functional.leaky_relu(one),
    "less": lambda one: 1 - 2 * one.erf(),
}


def functions_of(source: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    space: dict[str, Any] = {"tl": TORCH_AS_TRITON, "triton": SimpleNamespace(jit=lambda function: function)}
    exec(source, space)
    return space["forward"], space["backward"]


def inputs() -> list[Tensor]:
    """Among them values at which the functions here bend."""
    ends = torch.tensor([0.0, -0.0, 0.5, -0.5, 0.25, 30.0, -30.0])
    gate, up = torch.cartesian_prod(ends, ends).unbind(1)
    drawn = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    return [torch.cat([gate, drawn[0]]), torch.cat([up, drawn[1]])]


@pytest.mark.parametrize("name", [*OF_TWO, *OF_ONE])
def test_source_computes_the_function_and_its_gradients(name: str) -> None:
    function: Callable[..., Tensor] = OF_TWO[name] if name in OF_TWO else OF_ONE[name]
    num_inputs = 2 if name in OF_TWO else 1
    found = written(function, num_inputs)
    assert found is not None and found.has_up is (num_inputs == 2)
    forward, backward = functions_of(found.source)
    gate, up = inputs()
    leaves = [one.requires_grad_() for one in (gate, up)[:num_inputs]]
    expected = function(*leaves)
    grad = torch.linspace(-1, 1, len(gate))
    gradients = torch.autograd.grad(expected, leaves, grad, allow_unused=True, materialize_grads=True)
    gate, up = gate.detach(), up.detach()
    torch.testing.assert_close(forward(gate, up), expected.detach(), rtol=1e-5, atol=1e-6)
    results = backward(gate, up, grad)
    assert len(results) == 2
    for one, other in zip(results[:num_inputs], gradients, strict=True):
        torch.testing.assert_close(one + torch.zeros_like(gate), other, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_stays_so() -> None:
    found = written(lambda gate, up: functional.relu(gate) * up.clamp(-1, 1), 2)
    assert found is not None
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    forward, _ = functions_of(found.source)
    assert forward(nan, one).isnan() and forward(one, nan).isnan()


@pytest.mark.parametrize(
    "function",
    (
        torch.lgamma,
        lambda one: one.cumsum(-1),
        lambda one: one * float("inf"),
        lambda one: one.clamp(max=float("inf")),
        lambda one: one.pow(0.3),
        lambda one: torch.add(one, one, alpha=3),
    ),
)
def test_what_cannot_be_written_is_none(function: Callable[[Tensor], Tensor]) -> None:
    assert written(function, 1) is None
