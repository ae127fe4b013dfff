"""Sizes as expressions: those of tensors in their graph's symbols, and the symbols of the memory model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

__all__ = ["GROUPS", "ROWS", "is_contiguous", "larger", "size_expr", "smaller"]


def size_expr(size: int | torch.SymInt | sympy.Expr) -> sympy.Expr:
    """One size, or stride, as an expression; an expression as it is."""
    if isinstance(size, sympy.Expr):
        return size
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def is_contiguous(sizes: Sequence[sympy.Expr], strides: Sequence[sympy.Expr]) -> bool:
    """Whether elements stand one behind the other, the last dimension's first, at all values of the symbols."""
    dense = sympy.S.One
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and sympy.expand(stride - dense) != 0:
            return False
        dense *= size
    return True


ROWS = sympy.Symbol("R", integer=True, positive=True)
"""Routed rows in one chunk."""

GROUPS = sympy.Symbol("G", integer=True, positive=True)
"""Experts in one chunk, where a compiled function takes several."""


def larger(one: Any, other: Any) -> Any:
    """The larger of two numbers, or an expression where one of them is an expression."""
    return sympy.Max(one, other) if isinstance(one, sympy.Expr) or isinstance(other, sympy.Expr) else max(one, other)


def smaller(one: Any, other: Any) -> Any:
    """The smaller of two, as `larger`."""
    return sympy.Min(one, other) if isinstance(one, sympy.Expr) or isinstance(other, sympy.Expr) else min(one, other)
