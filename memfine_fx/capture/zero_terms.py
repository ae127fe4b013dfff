"""Branches that add zeros in the name of an expert without rows, so that its parameters get gradients: dropped.

    if mask.any():                                  if mask.any():
        out.index_add_(0, token, ...)                   out.index_add_(0, token, ...)
    elif self.training:                        ->
        out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())

The raised form gives such parameters gradients of zeros as well. Eager's 0 * inf = nan is not reproduced.
"""

from __future__ import annotations

import ast

from memfine_fx.capture.syntax import assigned_names, emptiness_guard

__all__ = ["without_zero_terms"]


def without_zero_terms(loop: ast.For) -> list[ast.stmt]:
    """The loop's body without such branches; conditions on anything that the body does not make stay as they are."""
    made = {name for statement in loop.body for name in assigned_names(statement)}
    return [_trimmed(one) if isinstance(one, ast.If) and _only_adds_zeros(one, made) else one for one in loop.body]


def _trimmed(node: ast.If) -> ast.If:
    return ast.copy_location(ast.If(node.test, node.body, []), node)


def _only_adds_zeros(node: ast.If, made: set[str]) -> bool:
    """Whether the other branch of a condition on emptiness does nothing but add zeros."""
    guard = emptiness_guard(ast.If(node.test, node.body, []))
    is_own = guard is not None and guard[0] in made
    return is_own and bool(node.orelse) and all(map(_adds_zeros, node.orelse))


def _adds_zeros(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return all(map(_adds_zeros, [*statement.body, *statement.orelse]))
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Add) and _is_zero_product(statement.value)
    if (
        not isinstance(statement, ast.Assign)
        or len(statement.targets) != 1
        or not isinstance(statement.value, ast.BinOp)
    ):
        return False
    left, right = statement.value.left, statement.value.right
    is_sum_onto_itself = isinstance(statement.value.op, ast.Add) and ast.unparse(left) == ast.unparse(
        statement.targets[0]
    )
    return is_sum_onto_itself and _is_zero_product(right)


def _is_zero_product(value: ast.expr) -> bool:
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mult):
        return False
    return any(isinstance(one, ast.Constant) and one.value == 0 for one in (value.left, value.right))
