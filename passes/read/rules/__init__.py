"""The one table of rules: an overload of functional ATen -> what its result is.

A rule takes the reader, the call and its arguments' values, and returns a value of the lattice (a list of them for a
call with several results), or raises `CannotChunk` where it can prove nothing.
"""

from __future__ import annotations

from typing import Any

from memfine_fx.passes.read.reader import Rule
from memfine_fx.passes.read.rules import blocks, combine, indices, masks, matmuls, moves, parts, pointwise, reductions
from memfine_fx.passes.read.rules.quantized import quantized_rule

__all__ = ["RULES", "rule_of"]


def rule_of(target: Any, is_packed: bool = False) -> Rule | None:
    """The rule of an overload, in the table, or of what is pointwise or a library's own; None where there is none.

    Args:
        target: the overload.
        is_packed: whether it works on packed numbers, for which labels say nothing.
    """
    if is_packed:
        return blocks.block_rule(target)
    rule = RULES.get(target) or pointwise.pointwise_rule(target) or quantized_rule(target)
    return rule or combine.library_rule(target)


RULES: dict[Any, Rule] = {}
for _module in (pointwise, reductions, moves, parts, indices, masks, matmuls, combine):
    for _target, _rule in _module.RULES.items():
        assert _target not in RULES, f"two rules for {_target}"
        RULES[_target] = _rule
