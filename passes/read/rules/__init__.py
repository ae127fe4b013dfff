"""The one table of rules: an overload of functional ATen -> what its result is.

A rule takes the reader, the call and its arguments' values, and returns a value of the lattice (a list of them for a
call with several results), or raises `CannotChunk` where it can prove nothing.
"""

from __future__ import annotations

from typing import Any

from memfine_fx.passes.read.reader import Rule
from memfine_fx.passes.read.rules import combine, indices, masks, matmuls, moves, parts, pointwise, reductions

__all__ = ["RULES", "pointwise_rule"]

pointwise_rule = pointwise.pointwise_rule

RULES: dict[Any, Rule] = {}
for _module in (pointwise, reductions, moves, parts, indices, masks, matmuls, combine):
    for _target, _rule in _module.RULES.items():
        assert _target not in RULES, f"two rules for {_target}"
        RULES[_target] = _rule
