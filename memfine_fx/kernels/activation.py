"""The experts' activation of a gate and an up projection, and its derivative, as epilogues of the products.

swiglu       silu(gate) * up
geglu        gelu(gate) * up, gelu by tanh
geglu_exact  gelu(gate) * up, gelu by the error function
clamped      GPT-OSS's: gate at most 7, up in [-7, 7]; gate * sigmoid(1.702 gate) * (up + 1)
relu2        relu(gate) squared; there is no up projection, and the argument in its place is not read

Any other pointwise activation comes as source (`Pointwise`), and is compiled into the kernels as these are.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
import triton
import triton.language as tl

from memfine_fx.kernels.computed_tables import functions_of
from memfine_fx.kernels.tables import Activation, ActivationName, Pointwise

__all__ = ["ACTIVATIONS", "activate", "activate_backward", "constants_of", "reference_activation"]

ACTIVATIONS: tuple[ActivationName, ...] = get_args(ActivationName)

_LIMIT, _SLOPE = 7.0, 1.702


def constants_of(activation: Activation) -> tuple[Any, Any]:
    """Return the constants `ACTIVATION` of `activate` and of `activate_backward`: a name twice, or two functions."""
    return _functions_of(activation.source) if isinstance(activation, Pointwise) else (activation, activation)


def _functions_of(source: str) -> tuple[Any, Any]:
    functions = functions_of(source)
    return functions["forward"], functions["backward"]


@triton.jit
def _tanh(value):
    return 2 * tl.sigmoid(2 * value) - 1


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """Return what the down projection multiplies, before the routing weight: the activated tile, in fp32."""
    if ACTIVATION == "swiglu":
        result = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "geglu":
        result = 0.5 * gate * (1 + _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    elif ACTIVATION == "geglu_exact":
        result = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "relu2":
        bounded = tl.maximum(gate, 0.0)
        result = bounded * bounded
    elif ACTIVATION != "clamped":
        result = ACTIVATION(gate, up)
    else:
        bounded = tl.minimum(gate, 7.0)
        result = bounded * tl.sigmoid(1.702 * bounded) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1)
    return result


@triton.jit
def activate_backward(gate, up, grad, ACTIVATION: tl.constexpr):
    """Return the gradients of the gate and of the up projection, from the gradient of what `activate` returns."""
    if ACTIVATION == "swiglu":
        share = tl.sigmoid(gate)
        grad_gate = grad * up * share * (1 + gate * (1 - share))
        grad_up = grad * gate * share
    elif ACTIVATION == "geglu":
        bend = _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
        grad_gate = grad * up * 0.5 * (1 + bend + gate * (1 - bend * bend) * slope)
        grad_up = grad * 0.5 * gate * (1 + bend)
    elif ACTIVATION == "geglu_exact":
        below = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        grad_gate = grad * up * (below + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate))
        grad_up = grad * gate * below
    elif ACTIVATION == "relu2":
        grad_gate = grad * 2 * tl.maximum(gate, 0.0)
        grad_up = grad_gate
    elif ACTIVATION != "clamped":
        grad_gate, grad_up = ACTIVATION(gate, up, grad)
    else:
        bounded = tl.minimum(gate, 7.0)
        share = tl.sigmoid(1.702 * bounded)
        inside = tl.minimum(tl.maximum(up, -7.0), 7.0)
        slope = share * (1 + 1.702 * bounded * (1 - share))
        grad_gate = tl.where(gate <= 7.0, grad * (inside + 1) * slope, 0.0)
        grad_up = tl.where((up >= -7.0) & (up <= 7.0), grad * bounded * share, 0.0)
    return grad_gate, grad_up


def reference_activation(gate: torch.Tensor, up: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """Compute `activate` in plain torch, which differentiates it."""
    if activation == "swiglu":
        return torch.nn.functional.silu(gate) * up
    if activation == "geglu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if activation == "geglu_exact":
        return torch.nn.functional.gelu(gate) * up
    if activation == "relu2":
        return torch.relu(gate).square()
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return gate * torch.sigmoid(_SLOPE * gate) * (up + 1)
