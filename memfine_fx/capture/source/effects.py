"""What an expert without rows would do in a loop that skips it: the condition under which it may be run after all.

A loop that runs every expert computes the same as one that skips some, provided that whatever an expert does, it does
to its own rows: then one without rows does nothing. Every change that outlives an iteration must therefore name rows of
the expert, something made from a mask, its places or a part. Counting, summing up a loss and logging do not.

One thing that an expert without rows does on purpose is dropped, adding zeros so that its parameters get gradients:

    if mask.any():                                  if mask.any():
        out.index_add_(0, token, ...)                   out.index_add_(0, token, ...)
    elif self.training:                        ->
        out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())

The raised form gives such parameters gradients of zeros as well. Eager's 0 * inf = nan is not reproduced.
"""

from __future__ import annotations

import ast

from memfine_fx.capture.source.helpers import PREFIX
from memfine_fx.capture.source.syntax import assigned_names, emptiness_guard, is_method, name_of, names_in

__all__ = ["acts_without_rows", "without_zero_terms"]


def acts_without_rows(loop: ast.For) -> bool:
    """Whether the body changes something for an expert without rows as well; such a loop must skip what it skips."""
    guards = [emptiness_guard(node) for node in ast.walk(loop) if isinstance(node, ast.stmt)]
    of_rows = {guard[0] for guard in guards if guard is not None}
    before = -1
    while before != len(of_rows):  # what is made of rows is of rows
        before = len(of_rows)
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign) and (_selects_rows(node.value) or names_in(node.value) & of_rows):
                of_rows |= {name for target in node.targets if _is_bare(target) for name in names_in(target)}
    own = names_in(loop.target)  # names that each iteration begins with
    return any(
        _outlives(node, own) and not _selects_rows(node) and not names_in(node) & of_rows for node in ast.walk(loop)
    )


def _is_bare(target: ast.expr) -> bool:
    return isinstance(target, (ast.Name, ast.Tuple))


def _selects_rows(node: ast.AST) -> bool:
    """Whether an expression takes where a mask holds, compares with the expert, or takes a part of a split."""
    return any(
        is_method(child, ("where", "nonzero", "eq", "bool"))
        or (isinstance(child, ast.Compare) and isinstance(child.ops[0], ast.Eq))
        or (isinstance(child, ast.Call) and name_of(child.func) == PREFIX + "part")
        for child in ast.walk(node)
    )


def _outlives(node: ast.AST, own: set[str]) -> bool:
    """Whether a statement changes something that the next iteration, or what follows the loop, may read."""
    match node:
        case ast.AugAssign() | ast.Expr(ast.Call()):
            return True
        case ast.Assign(targets, value):
            return any(
                isinstance(target, (ast.Subscript, ast.Attribute))
                or (_is_bare(target) and bool((names_in(target) & names_in(value)) - own))
                for target in targets
            )
    return False


def without_zero_terms(loop: ast.For) -> list[ast.stmt]:
    """The loop's body without such branches; conditions on anything that the body does not make stay as they are."""
    made = {name for statement in loop.body for name in assigned_names(statement)}
    return [_trimmed(one) if isinstance(one, ast.If) and _only_adds_zeros(one, made) else one for one in loop.body]


def _trimmed(node: ast.If) -> ast.If:
    return ast.copy_location(ast.If(node.test, node.body, []), node)


def _only_adds_zeros(node: ast.If, made: set[str]) -> bool:
    """Whether the other branch of a condition on emptiness does nothing but add zeros."""
    guard = emptiness_guard(_trimmed(node))
    return guard is not None and guard[0] in made and bool(node.orelse) and all(map(_adds_zeros, node.orelse))


def _adds_zeros(statement: ast.stmt) -> bool:
    """out[...] += 0 * X, out = out + 0 * X, or nothing else under a condition."""
    match statement:
        case ast.If(_, body, otherwise):
            return all(map(_adds_zeros, [*body, *otherwise]))
        case ast.AugAssign(_, ast.Add(), term):
            return _is_zero_product(term)
        case ast.Assign([target], ast.BinOp(left, ast.Add(), term)):
            return ast.unparse(left) == ast.unparse(target) and _is_zero_product(term)
    return False


def _is_zero_product(value: ast.expr) -> bool:
    match value:
        case ast.BinOp(left, ast.Mult(), right):
            return any(isinstance(one, ast.Constant) and one.value == 0 for one in (left, right))
    return False
