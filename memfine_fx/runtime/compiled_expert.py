"""The interface between the chunk loop and an expert's compiled forward and backward.

The passes build these; the loop only calls them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import sympy
import torch

from memfine_fx.records import ParamKind, SavePolicy

__all__ = [
    "Compiled",
    "CompiledBackward",
    "CompiledExpert",
    "Operand",
    "Product",
    "SavedTensor",
    "SavingFunctions",
]


class Compiled(Protocol):
    """A compiled function as a function.

    Args:
        peak_bytes: live bytes of one call beyond its arguments, in the symbols R and G.
        results_bytes: of what it returns.
    """

    peak_bytes: sympy.Expr
    results_bytes: sympy.Expr

    def __call__(self, *args: torch.Tensor) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True)
class Operand:
    """A factor of a weight gradient: an argument or a result of the backward function, maybe transposed."""

    is_argument: bool
    index: int
    is_transposed: bool

    def value(self, arguments: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = (arguments if self.is_argument else results)[self.index]
        return tensor.t() if self.is_transposed else tensor


@dataclass(frozen=True)
class Product:
    """left @ right, and what is added to it; the loop multiplies straight into where the result stays."""

    left: Operand
    right: Operand
    added: Operand | None = None

    def into(self, place: torch.Tensor, arguments: Sequence[torch.Tensor]) -> None:
        """Multiply operands that are all arguments of the function."""
        left, right = self.left.value(arguments, ()), self.right.value(arguments, ())
        if self.added is None:
            torch.mm(left, right, out=place)
        else:
            torch.addmm(self.added.value(arguments, ()), left, right, out=place)


@dataclass(frozen=True)
class CompiledBackward:
    """(grad [R,H_out], rows, weight if any, *params) -> gradients; see `param_grads` for the parameters.

    Args:
        rows_grad, weight_grad: where those gradients stand among the results, or None if not wanted.
        param_grads: one per parameter: a product, or where the gradient stands among the results; None where not
            wanted.
    """

    call: Compiled
    rows_grad: int | None
    weight_grad: int | None
    param_grads: tuple[Product | int | None, ...]

    @property
    def peak_bytes(self) -> sympy.Expr:
        return self.call.peak_bytes

    @property
    def results_bytes(self) -> sympy.Expr:
        return self.call.results_bytes


@dataclass(frozen=True)
class SavedTensor:
    """A tensor [R, *shape] of a compiled function that forward saves for backward, one row for each routed row."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SavingFunctions:
    """A forward and a backward whose backward takes the saved tensors after its other arguments.

    The forward takes those of the saved tensors whose entry in `given` is not None after its other arguments, and
    returns the contribution and all other saved tensors.

    Args:
        forward, backward: as without saving, but for the saved tensors.
        saved: the saved tensors, in order.
        flops_per_row: of the matmuls that backward is spared.
        given: for each of `saved` the product that it is, where the loop can compute it in place; else None.
    """

    forward: Compiled
    backward: CompiledBackward
    saved: tuple[SavedTensor, ...]
    flops_per_row: int
    given: tuple[Product | None, ...] = ()

    @property
    def row_bytes(self) -> int:
        return sum(tensor.row_bytes for tensor in self.saved)

    @property
    def copied_row_bytes(self) -> int:
        """Return the bytes of a saved row that the function computes elsewhere, which are written a second time."""
        return sum(tensor.row_bytes for tensor, product in zip(self.saved, self.given, strict=True) if product is None)


class CompiledExpert(Protocol):
    """One expert function, compiled at most once per direction and set of wanted gradients."""

    key: str
    has_weight: bool
    param_kinds: tuple[ParamKind, ...]
    out_width: int
    contribution_dtype: torch.dtype
    takes_group: bool
    num_factored: int
    """How many of its matmuls meet a low-rank term of their matrix factor by factor."""

    def forward(self) -> Compiled:
        """(rows [R,H], weight [R] if any, *params) -> [contribution [R,H_out]]."""
        ...

    def backward(self, wanted: tuple[bool, ...]) -> CompiledBackward:
        """`wanted`: rows, weight (False if there is none), then each parameter."""
        ...

    def saving(self, policy: SavePolicy, wanted: tuple[bool, ...]) -> SavingFunctions | None:
        """Return the pair that saves so much; None where there is nothing of that to save."""
        ...
