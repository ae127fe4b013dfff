"""The experts' tables as the kernels see them: three matrices an expert, wherever they stand in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = [
    "LAYOUTS",
    "Activation",
    "ActivationName",
    "KernelForm",
    "Layout",
    "Pointwise",
    "Tables",
    "are_projections",
    "divided",
    "has_up",
    "num_projections_of",
    "trained_parts",
]


@dataclass(frozen=True)
class Pointwise:
    """An activation that has no name here, as Triton source (`passes.lower.epilogue`).

    Args:
        source: `forward(gate, up)`, the result, and `backward(gate, up, grad)`, both gradients, of fp32 tiles.
        has_up: whether it reads `up`.
    """

    source: str
    has_up: bool


ActivationName = Literal["swiglu", "geglu", "geglu_exact", "clamped", "relu2"]
Activation = ActivationName | Pointwise
"""See `memfine_fx.runtime.kernels.activation`."""

Layout = Literal["apart", "apart_in_out", "halves", "halves_in_out", "interleaved_in_out", "single", "single_in_out"]
"""How the parameters hold them, matrices of E experts in front:

    apart               gate [F,H], up [F,H], down [H,F]
    apart_in_out        gate [H,F], up [H,F], down [F,H]
    halves              gate and up [2F,H] one after the other, down [H,F]
    halves_in_out       gate and up [H,2F] one after the other, down [F,H]
    interleaved_in_out  gate and up [H,2F] column by column, down [F,H]
    single              gate [F,H] and no up, down [H,F]
    single_in_out       gate [H,F] and no up, down [F,H]

Where experts have biases, those follow in the same order: of one or both projections, then [H] of down; a bias of gate
and up in one is [2F], divided as the columns are.
"""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_APART = ("apart", "apart_in_out")
_SINGLE = ("single", "single_in_out")
_OUT_IN = ("apart", "halves", "single")


@dataclass(frozen=True)
class KernelForm:
    """What of an expert function makes it one that the kernels know.

    Args:
        layout: of its parameters.
        positions: where gate and up, or both in one, down and the biases stand among them.
        activation: between the projections.
        has_bias: whether every projection has one.
    """

    layout: Layout
    positions: tuple[int, ...]
    activation: Activation = "swiglu"
    has_bias: bool = False

    @property
    def has_up(self) -> bool:
        return has_up(self.activation)


@dataclass(frozen=True)
class Tables:
    """Views of the parameters, or of their gradients.

    Args:
        gate, up: [E,F,H], of the same strides; the same where there is no up projection.
        down: [E,H,F].
        gate_bias, up_bias: [E,F], of the same strides, or None.
        down_bias: [E,H], or None.
        projections: gate and up, or [E,2F,H] where one parameter holds both, or gate alone.
        projection_biases: theirs, [E,F] or [E,2F]; none where there are no biases.
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    projections: Sequence[torch.Tensor] = ()
    projection_biases: Sequence[torch.Tensor] = ()

    @property
    def num_experts(self) -> int:
        return self.gate.shape[0]

    @property
    def width(self) -> int:
        return self.gate.shape[1]

    @property
    def hidden(self) -> int:
        return self.gate.shape[2]

    @staticmethod
    def of(params: Sequence[torch.Tensor], layout: Layout, *, has_bias: bool = False) -> Tables:
        """The views.

        Raises:
            ValueError: the parameters have not that layout.
        """
        num_projections = num_projections_of(layout)
        if len(params) != (num_projections + 1) * (1 + has_bias):
            with_bias = " with biases" if has_bias else ""
            raise ValueError(f"layout {layout!r}{with_bias} does not have {len(params)} parameters")
        matrices, biases = params[: num_projections + 1], params[num_projections + 1 :]
        is_out_in = layout in _OUT_IN
        *projections, down = matrices if is_out_in else [matrix.mT for matrix in matrices]
        gate, up = divided(projections, layout)
        if not has_bias:
            tables = Tables(gate, up, down, projections=projections)
        else:
            gate_bias, up_bias = divided(biases[:-1], layout)
            tables = Tables(gate, up, down, gate_bias, up_bias, biases[-1], projections, biases[:-1])
        tables._check(layout)
        return tables

    def _check(self, layout: Layout) -> None:
        num_experts, width, hidden = self.gate.shape
        if self.up.shape != self.gate.shape or self.up.stride() != self.gate.stride():
            raise ValueError(f"gate {_described(self.gate)} and up {_described(self.up)} differ in layout {layout!r}")
        if self.down.shape != (num_experts, hidden, width):
            raise ValueError(
                f"down {_described(self.down)} does not take back what gate {_described(self.gate)} gives, "
                f"in layout {layout!r}"
            )
        if self.gate_bias is None or self.up_bias is None or self.down_bias is None:
            return
        shapes = [tuple(bias.shape) for bias in (self.gate_bias, self.up_bias, self.down_bias)]
        if shapes != [(num_experts, width), (num_experts, width), (num_experts, hidden)]:
            raise ValueError(f"biases {shapes} of gate, up and down do not meet gate {_described(self.gate)}")
        if self.gate_bias.stride() != self.up_bias.stride():
            raise ValueError(f"biases {_described(self.gate_bias)} and {_described(self.up_bias)} differ in strides")


def num_projections_of(layout: Layout) -> int:
    """How many parameters hold gate and up."""
    return 2 if layout in _APART else 1


def has_up(activation: Activation) -> bool:
    """Whether an activation is of gate and up, or of one projection alone."""
    return activation.has_up if isinstance(activation, Pointwise) else activation != "relu2"


def are_projections(layout: Layout, *, has_bias: bool) -> list[bool]:
    """Of each parameter, whether it is of gate and up, not of down."""
    group = [*[True] * num_projections_of(layout), False]
    return group * (1 + has_bias)


def trained_parts(layout: Layout, wanted: Sequence[bool], *, has_bias: bool) -> tuple[bool, bool]:
    """Whether anything of gate and up is trained, and of down.

    Args:
        wanted: of each parameter, whether its gradient is.
    """
    pairs = list(zip(are_projections(layout, has_bias=has_bias), wanted, strict=True))
    projections = any(is_wanted for is_one, is_wanted in pairs if is_one)
    return projections, any(is_wanted for is_one, is_wanted in pairs if not is_one)


def divided(projections: Sequence[torch.Tensor], layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of what holds them, experts or rows in front and the width behind them."""
    if layout in _APART:
        gate, up = projections
        return gate, up
    (both,) = projections
    if layout in _SINGLE:
        return both, both
    if layout == "interleaved_in_out":
        num_experts, width, *depth = both.shape
        gate, up = both.view(num_experts, width // 2, 2, *depth).unbind(2)
    else:
        gate, up = both.chunk(2, dim=1)
    return gate, up


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of strides {list(tensor.stride())}"
