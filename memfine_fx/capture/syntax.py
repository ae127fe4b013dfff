"""Patterns of syntax that the rewriting of loops looks for, one function each."""

from __future__ import annotations

import ast
from typing import Any

from memfine_fx.capture.helpers import PREFIX

__all__ = [
    "acts_without_rows",
    "assigned_names",
    "assignments",
    "count_guard",
    "emptiness_guard",
    "helper_call",
    "is_equality",
    "is_method",
    "is_name",
    "is_only_index",
    "loaded",
    "mask_of",
    "name_of",
    "names_in",
    "nonzero_of",
    "replace_value",
    "selects_by",
    "unique_of",
    "unwrapped_name",
]


def unwrapped_name(statement: ast.stmt, expert: str) -> str | None:
    """n of n = e[0], n = e.item(), n = int(e), where e is the loop's variable."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    value = statement.value
    while is_name(getattr(value, "func", value), "int") and isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    while is_method(value, ("item", "squeeze")):
        value = value.func.value  # type: ignore[attr-defined]  # a method's call
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and value.slice.value == 0:
        value = value.value
    return name_of(statement.targets[0]) if is_name(value, expert) and value is not statement.value else None


def assignments(statement: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of a = x, or of each in a, b = x, y."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def replace_value(statement: ast.stmt, old: ast.expr, new: ast.expr) -> None:
    assert isinstance(statement, ast.Assign)
    if isinstance(statement.value, ast.Tuple):
        statement.value.elts = [new if value is old else value for value in statement.value.elts]
    else:
        statement.value = new


def unique_of(value: ast.expr) -> ast.expr | None:
    """X of X.unique() or torch.unique(X), as a tensor or a list."""
    if is_method(value, ("tolist",)):
        value = value.func.value  # type: ignore[attr-defined]  # a method's call
    if not is_method(value, ("unique",)) or not isinstance(value, ast.Call) or value.keywords:
        return None
    assert isinstance(value.func, ast.Attribute)
    if is_name(value.func.value, "torch"):
        return value.args[0] if len(value.args) == 1 else None
    return None if value.args else value.func.value


def is_equality(node: ast.AST, index: ast.expr, expert: str) -> bool:
    """index == e"""
    is_equality = isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq)
    if not is_equality or not isinstance(node, ast.Compare):
        return False
    return ast.dump(node.left) == ast.dump(index) and is_name(node.comparators[0], expert)


def count_guard(statement: ast.stmt) -> tuple[str, str, list[ast.stmt]] | None:
    """(counts, e, statements that remain) of a condition on counts[e] being zero."""
    if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.test, ast.Compare):
        return None
    test = statement.test
    if len(test.ops) != 1 or not is_zero(test.comparators[0]) or not isinstance(test.left, ast.Subscript):
        return None
    counts, expert = name_of(test.left.value), name_of(test.left.slice)
    skips = len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue)
    if counts is None or expert is None or not isinstance(test.ops[0], ast.Eq if skips else (ast.Gt, ast.NotEq)):
        return None
    return counts, expert, [] if skips else statement.body


def is_method(node: ast.AST | None, names: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def is_only_index(loop: ast.For, name: str) -> bool:
    """Whether a name is read in the loop, and only as (a part of) what something is indexed by."""
    reads = [node for node in ast.walk(loop) if is_name(node, name) and isinstance(node.ctx, ast.Load)]  # type: ignore[attr-defined]
    indexing = [
        part
        for node in ast.walk(loop)
        if isinstance(node, ast.Subscript)
        for part in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])
        if is_name(part, name)
    ]
    return bool(reads) and len(reads) == len(indexing)


def nonzero_of(value: ast.AST) -> ast.expr | None:
    """X of X.nonzero() or torch.nonzero(X), not as a tuple."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "nonzero":
        return None
    is_tuple = any(not (isinstance(k.value, ast.Constant) and k.value.value is False) for k in value.keywords)
    if is_tuple:
        return None
    if is_name(value.func.value, "torch"):
        return value.args[0] if len(value.args) == 1 else None
    return None if value.args else value.func.value


def mask_of(hits: ast.expr) -> ast.expr | None:
    """mask of (mask.sum(...) > 0), torch.greater(mask.sum(...), 0), mask.any(...) or mask.sum(...)."""
    if isinstance(hits, ast.Compare) and len(hits.ops) == 1 and isinstance(hits.ops[0], ast.Gt):
        return mask_of(hits.left) if is_zero(hits.comparators[0]) else None
    if not isinstance(hits, ast.Call) or not isinstance(hits.func, ast.Attribute):
        return None
    if hits.func.attr in ("greater", "gt"):
        operands = hits.args if is_name(hits.func.value, "torch") else [hits.func.value, *hits.args]
        return mask_of(operands[0]) if len(operands) == 2 and is_zero(operands[1]) else None
    return hits.func.value if hits.func.attr in ("sum", "any") and not is_name(hits.func.value, "torch") else None


def selects_by(loop: ast.For, mask: ast.expr, experts: set[str]) -> bool:
    """Whether the body takes its rows by mask[e]."""
    wanted = ast.dump(mask)
    return any(
        isinstance(node, ast.Subscript) and ast.dump(node.value) == wanted and bool(experts & names_in(node.slice))
        for node in ast.walk(loop)
    )


def emptiness_guard(statement: ast.stmt) -> tuple[str, list[ast.stmt]] | None:
    """(name, statements that remain) of a condition on whether something is empty."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return None
    if len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue):
        name = tested_for(statement.test, wants_empty=True)
        return None if name is None else (name, [])
    name = tested_for(statement.test, wants_empty=False)
    return None if name is None else (name, statement.body)


def tested_for(test: ast.expr, *, wants_empty: bool) -> str | None:
    """The name that a test finds empty (or not empty)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return tested_for(test.operand, wants_empty=not wants_empty)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and is_zero(test.comparators[0]):
        operators = (ast.Eq,) if wants_empty else (ast.Gt, ast.NotEq)
        return measured(test.left) if isinstance(test.ops[0], operators) else None
    return None if wants_empty else measured(test)


def measured(value: ast.expr) -> str | None:
    """x of x.numel(), x.any(), torch.any(x), x.sum(), x.shape[0], x.size(0), len(x), each with or without .item()."""
    if isinstance(value, ast.Call) and is_name(value.func, "len") and len(value.args) == 1:
        return value.args[0].id if isinstance(value.args[0], ast.Name) else None
    if isinstance(value, ast.Subscript) and is_zero(value.slice) and isinstance(value.value, ast.Attribute):
        return name_of(value.value.value) if value.value.attr == "shape" else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    attribute, source = value.func.attr, value.func.value
    if attribute == "item" and not value.args:
        return measured(source)
    if is_name(source, "torch") and attribute in ("any", "sum", "numel") and len(value.args) == 1:
        return name_of(value.args[0])
    if attribute == "size" and len(value.args) == 1 and is_zero(value.args[0]):
        return name_of(source)
    return name_of(source) if attribute in ("numel", "nelement", "any", "sum") and not value.args else None


def acts_without_rows(loop: ast.For) -> bool:
    """Whether the body does something that an expert without rows would do as well: count, sum up a loss, log.

    Such a loop must skip what it skips. Every change that outlives an iteration must name rows of the expert: something
    made from a mask, its places or a part.
    """
    guards = [emptiness_guard(node) for node in ast.walk(loop) if isinstance(node, ast.stmt)]
    of_rows = {guard[0] for guard in guards if guard is not None}
    own = names_in(loop.target)
    before = -1
    while before != len(of_rows):
        before = len(of_rows)
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign) and (_selects_rows(node.value) or names_in(node.value) & of_rows):
                of_rows |= {name for target in node.targets for name in names_in(target) if _is_bare(target)}
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
    """Whether a statement changes something that the next iteration, or what follows the loop, may read.

    Args:
        node: a statement or part of one.
        own: names that each iteration begins with.
    """
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign):
        is_stored = any(isinstance(target, (ast.Subscript, ast.Attribute)) for target in node.targets)
        return is_stored or any(
            (names_in(target) & names_in(node.value)) - own for target in node.targets if _is_bare(target)
        )
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def assigned_names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def name_of(node: ast.AST | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def is_name(node: ast.AST | None, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def is_zero(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0 and not isinstance(node.value, bool)


def loaded(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def helper_call(name: str, arguments: list[Any], keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(PREFIX + name, ast.Load()), list(arguments), keywords or [])
