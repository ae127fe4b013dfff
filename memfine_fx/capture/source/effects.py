"""Branches for an expert without rows that add zeros, so that its parameters get gradients:

    if mask.any():                                  if mask.any():
        out.index_add_(0, token, ...)                   out.index_add_(0, token, ...)
    elif self.training:                        ->
        out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())

They are dropped. The raised form gives such parameters gradients of zeros as well. Eager's 0 * inf = nan is not
reproduced. Where both branches write the same but for such zeros, the condition is dropped with the other branch:

    if rows.shape[0] > 0:
        out[mask] = rows                                  ->  out[mask] = rows
    else:
        out[mask] = rows + 0 * sum(p.sum() for p in expert.parameters())
"""

from __future__ import annotations

import ast

from memfine_fx.capture.source.guards import guard_of
from memfine_fx.capture.source.syntax import assigned_names, names_in

__all__ = ["without_zero_terms"]


def without_zero_terms(loop: ast.For) -> list[ast.stmt]:
    """The loop's body without such branches; conditions on anything that the body does not make stay as they are."""
    assigned = {name for statement in loop.body for name in assigned_names(statement)}
    body: list[ast.stmt] = []
    for statement in loop.body:
        if not isinstance(statement, ast.If) or not statement.orelse or not _is_guard(statement, assigned):
            body.append(statement)
        elif _only_adds_zeros(statement):
            body.append(_trimmed(statement))
        else:
            body += statement.body if _writes_the_same(statement) else [statement]
    return body


def _is_guard(node: ast.If, made: set[str]) -> bool:
    """Whether a condition on emptiness asks about something that the loop's body makes."""
    guard = guard_of(_trimmed(node), [])
    return guard is not None and bool(names_in(guard.measure) & made)


def _trimmed(node: ast.If) -> ast.If:
    return ast.copy_location(ast.If(node.test, node.body, []), node)


def _only_adds_zeros(node: ast.If) -> bool:
    """Whether the other branch of a condition does nothing but add zeros."""
    return all(map(_adds_zeros, node.orelse))


def _writes_the_same(node: ast.If) -> bool:
    """Whether both branches of a condition write the same entries, where one may add zeros to them."""
    return len(node.body) == len(node.orelse) and all(map(_are_writes_of_same, node.body, node.orelse))


def _are_writes_of_same(left: ast.stmt, right: ast.stmt) -> bool:
    match left, right:
        case ast.Assign([ast.Subscript() as target], value), ast.Assign([ast.Subscript() as other_target], other):
            values = {ast.dump(_without_zero_term(value)), ast.dump(_without_zero_term(other))}
            return ast.dump(target) == ast.dump(other_target) and len(values) == 1 and _does_nothing_else(target)
    return False


def _without_zero_term(value: ast.expr) -> ast.expr:
    """X of X + 0 * Y"""
    match value:
        case ast.BinOp(left, ast.Add(), term) if _is_zero_product(term):
            return left
    return value


def _adds_zeros(statement: ast.stmt) -> bool:
    """out[...] += 0 * X, out = out + 0 * X, or nothing else under a condition."""
    match statement:
        case ast.If(test, body, otherwise):
            return _does_nothing_else(test) and all(map(_adds_zeros, [*body, *otherwise]))
        case ast.AugAssign(target, ast.Add(), term):
            return _does_nothing_else(target) and _is_zero_product(term)
        case ast.Assign([target], ast.BinOp(left, ast.Add(), term)):
            is_own = ast.unparse(left) == ast.unparse(target) and _does_nothing_else(target)
            return is_own and _is_zero_product(term)
    return False


def _is_zero_product(value: ast.expr) -> bool:
    match value:
        case ast.BinOp(left, ast.Mult(), right):
            has_zero = any(isinstance(factor, ast.Constant) and factor.value == 0 for factor in (left, right))
            return has_zero and _does_nothing_else(left) and _does_nothing_else(right)
    return False


def _does_nothing_else(value: ast.AST) -> bool:
    """Whether an expression only has a value: names, numbers and attributes, items, sums and sums over parameters."""
    match value:
        case ast.Call(ast.Attribute(_, "sum" | "mean") as method, arguments, []):
            parts: list[ast.AST] = [method.value, *arguments]
        case ast.Call(ast.Name("sum"), [ast.GeneratorExp(term, loops) | ast.ListComp(term, loops)], []):
            parts = [term, *(part for loop in loops for part in (_owner_of_parameters(loop.iter), *loop.ifs))]
        case ast.Call() | ast.NamedExpr() | ast.Lambda() | ast.Await() | ast.Yield() | ast.YieldFrom():
            return False
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp() | ast.JoinedStr():
            return False
        case _:
            parts = list(ast.iter_child_nodes(value))
    return all(map(_does_nothing_else, parts))


def _owner_of_parameters(value: ast.expr) -> ast.expr:
    """X of X.parameters()"""
    match value:
        case ast.Call(ast.Attribute(owner, "parameters"), [], []):
            return owner
    return value
