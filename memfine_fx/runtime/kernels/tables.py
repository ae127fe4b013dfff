"""The experts' tables as the kernels see them: three matrices an expert, wherever they stand in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = ["LAYOUTS", "KernelForm", "Layout", "Tables"]

Layout = Literal["apart", "apart_in_out", "halves", "halves_in_out", "interleaved_in_out"]
"""How the parameters hold them, matrices of E experts in front:

    apart               gate [F,H], up [F,H], down [H,F]
    apart_in_out        gate [H,F], up [H,F], down [F,H]
    halves              gate and up [2F,H] one after the other, down [H,F]
    halves_in_out       gate and up [H,2F] one after the other, down [F,H]
    interleaved_in_out  gate and up [H,2F] column by column, down [F,H]
"""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_APART = ("apart", "apart_in_out")


@dataclass(frozen=True)
class KernelForm:
    """What of an expert function makes it one that the kernels know: SwiGLU experts.

    Args:
        layout: of its parameters.
        positions: where gate and up, or both in one, and down stand among them.
    """

    layout: Layout
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Tables:
    """Views of the parameters, or of their gradients.

    Args:
        gate, up: [E,F,H], of the same strides.
        down: [E,H,F].
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

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
    def of(params: Sequence[torch.Tensor], layout: Layout) -> Tables:
        """The views.

        Raises:
            ValueError: the parameters have not that layout.
        """
        *projections, down = params
        if len(projections) != (2 if layout in _APART else 1):
            raise ValueError(f"layout {layout!r} does not have {len(params)} parameters")
        if layout in _APART:
            gate, up = projections if layout == "apart" else (one.mT for one in projections)
        elif layout == "interleaved_in_out":
            (both,) = projections
            gate, up = (half.mT for half in both.view(*both.shape[:2], -1, 2).unbind(-1))
        else:
            both = projections[0] if layout == "halves" else projections[0].mT
            gate, up = both.chunk(2, dim=1)
        tables = Tables(gate, up, down if layout in ("apart", "halves") else down.mT)
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


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of strides {list(tensor.stride())}"
