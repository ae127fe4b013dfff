"""Symbols of the memory model."""

from __future__ import annotations

import sympy

__all__ = ["GROUPS", "ROWS"]

ROWS = sympy.Symbol("R", integer=True, positive=True)
"""Routed rows in one chunk."""

GROUPS = sympy.Symbol("G", integer=True, positive=True)
"""Experts in one chunk, where a body takes several."""
