"""A tensor's sizes as expressions in its graph's symbols."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

__all__ = ["is_contiguous", "size_expr"]


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
