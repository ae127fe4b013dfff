"""Symbols of the memory model, and what makes one formula hold for numbers and for expressions."""

from __future__ import annotations

from typing import Any

import sympy

__all__ = ["GROUPS", "ROWS", "larger", "smaller"]

ROWS = sympy.Symbol("R", integer=True, positive=True)
"""Routed rows in one chunk."""

GROUPS = sympy.Symbol("G", integer=True, positive=True)
"""Experts in one chunk, where a body takes several."""


def larger(one: Any, other: Any) -> Any:
    """The larger of two numbers, or an expression where one of them is an expression."""
    return sympy.Max(one, other) if isinstance(one, sympy.Expr) or isinstance(other, sympy.Expr) else max(one, other)


def smaller(one: Any, other: Any) -> Any:
    """The smaller of two, as `larger`."""
    return sympy.Min(one, other) if isinstance(one, sympy.Expr) or isinstance(other, sympy.Expr) else min(one, other)
