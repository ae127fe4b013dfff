"""A tensor's sizes as expressions in its graph's symbols."""

from __future__ import annotations

import sympy
import torch

__all__ = ["size_expr"]


def size_expr(size: int | torch.SymInt | sympy.Expr) -> sympy.Expr:
    """One size, or stride, as an expression; an expression as it is."""
    if isinstance(size, sympy.Expr):
        return size
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
