"""Compare an optimized model with an unmodified eager copy: outputs and every gradient."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

import memfine_fx

FP32_TOLERANCE = 1e-5
BF16_FACTOR = 1.25


@dataclass(frozen=True)
class Gradients:
    """What one step computed: its outputs and gradients by name."""

    tensors: dict[str, torch.Tensor]

    def error_from(self, reference: Gradients) -> dict[str, float]:
        assert self.tensors.keys() == reference.tensors.keys()
        return {name: relative_error(tensor, reference.tensors[name]) for name, tensor in self.tensors.items()}


def relative_error(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Of the whole tensor in fp64; against a reference of (nearly) zeros, absolute."""
    exact = reference.detach().double()
    return float((tensor.detach().double() - exact).norm() / exact.norm().clamp_min(1e-6))


def optimized_copy(model: torch.nn.Module, *, inner: str = "eager", **fields: Any) -> torch.nn.Module:
    config = memfine_fx.Config(inner_backend=inner, **fields)
    return memfine_fx.optimize(copy.deepcopy(model), inner_backend=inner, dynamic=True, config=config)


def run_step(model: torch.nn.Module, inputs: dict[str, Any]) -> Gradients:
    """Forward and backward; floating-point inputs get gradients too."""
    model.zero_grad()
    leaves = {
        name: value.detach().clone().requires_grad_() if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    output = model(**leaves)
    tensors = {"output": _main_output(output).detach()}
    _loss(output).backward()
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            assert leaf.grad is not None
            tensors[f"d {name}"] = leaf.grad
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"d {name}"] = parameter.grad.detach().clone()
    return Gradients(tensors)


def assert_same_step(model: torch.nn.Module, reference: torch.nn.Module, inputs: dict[str, Any]) -> None:
    """Outputs and all gradients agree to the fp32 gate."""
    errors = run_step(model, inputs).error_from(run_step(reference, inputs))
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < FP32_TOLERANCE, f"{worst}: {errors[worst]:.2e}"


def assert_same_step_up_to_zeros(model: torch.nn.Module, reference: torch.nn.Module, inputs: dict[str, Any]) -> None:
    """As `assert_same_step`, where a gradient that eager leaves at None must be zero."""
    step, expected = run_step(model, inputs), run_step(reference, inputs)
    extra = {name: step.tensors.pop(name) for name in step.tensors.keys() - expected.tensors.keys()}
    assert not any(gradient.any() for gradient in extra.values())
    assert max(step.error_from(expected).values()) < FP32_TOLERANCE


def assert_no_worse_than_eager(
    model: torch.nn.Module, eager: torch.nn.Module, reference: torch.nn.Module, inputs: dict[str, Any]
) -> None:
    """bf16 gate: over all tensors together, no further from fp32 than eager bf16 is (x1.25)."""
    truth = run_step(reference, {name: _as_fp32(value) for name, value in inputs.items()})
    ours = run_step(model, inputs).error_from(truth)
    theirs = run_step(eager, inputs).error_from(truth)
    for name in ours:
        assert ours[name] <= BF16_FACTOR * theirs[name] + 1e-5, f"{name}: {ours[name]:.2e} against {theirs[name]:.2e}"


def _as_fp32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


def _main_output(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


def _loss(output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        return output.loss
    probe = torch.linspace(-1, 1, output.numel(), dtype=torch.float32, device=output.device).view(output.shape)
    return (output.float() * probe).sum()
