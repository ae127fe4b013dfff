"""Patterns of syntax that the forms look for, one function each; None is what does not match."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from memfine_fx.capture.source.helpers import PREFIX

__all__ = [
    "assigned_names",
    "assignments",
    "helper_call",
    "is_equality",
    "is_method",
    "is_name",
    "is_only_index",
    "is_zero",
    "loaded",
    "mask_of",
    "name_of",
    "names_in",
    "nonzero_of",
    "replace_value",
    "selects_by",
    "stored",
    "unique_of",
    "unwrapped_name",
    "without_int",
    "without_methods",
]


def name_of(node: ast.AST | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def is_name(node: ast.AST | None, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def is_zero(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0 and not isinstance(node.value, bool)


def is_method(node: ast.AST | None, names: Sequence[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def assigned_names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def assignments(statement: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """(target, value) of a = x, or of each in a, b = x, y."""
    match statement:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(targets) == len(values):
            return list(zip(targets, values, strict=True))
        case ast.Assign([target], value):
            return [(target, value)]
    return []


def replace_value(statement: ast.stmt, old: ast.expr, new: ast.expr) -> None:
    """Replace the value of an assignment, or one value in the tuple that it assigns, in place."""
    match statement:
        case ast.Assign(value=ast.Tuple(values) as several):
            several.elts = [new if value is old else value for value in values]
        case ast.Assign():
            statement.value = new


def loaded(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def stored(name: str) -> ast.Name:
    return ast.Name(name, ast.Store())


def helper_call(name: str, arguments: Sequence[ast.expr], keywords: Sequence[ast.keyword] = ()) -> ast.Call:
    return ast.Call(loaded(PREFIX + name), list(arguments), list(keywords))


def without_int(value: ast.expr) -> ast.expr:
    """X of int(X)."""
    while isinstance(value, ast.Call) and is_name(value.func, "int") and len(value.args) == 1:
        value = value.args[0]
    return value


def without_methods(value: ast.expr, names: Sequence[str]) -> ast.expr:
    """X of X.cpu().tolist(), where names are ("cpu", "tolist")."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in names:
        value = value.func.value
    return value


def unwrapped_name(statement: ast.stmt, expert: str) -> str | None:
    """n of n = e[0], n = e.item(), n = int(e), where e is the loop's variable."""
    match statement:
        case ast.Assign([ast.Name(name)], written):
            value = without_methods(without_int(written), ("item", "squeeze"))
            if isinstance(value, ast.Subscript) and is_zero(value.slice):
                value = value.value
            return name if is_name(value, expert) and value is not written else None
    return None


def unique_of(value: ast.expr) -> ast.expr | None:
    """X of X.unique() or torch.unique(X), as a tensor or a list."""
    match without_methods(value, ("tolist",)):
        case ast.Call(ast.Attribute(source, "unique"), arguments, []):
            return _operand(source, arguments)
    return None


def nonzero_of(value: ast.expr) -> ast.expr | None:
    """X of X.nonzero() or torch.nonzero(X), not as a tuple."""
    match value:
        case ast.Call(ast.Attribute(source, "nonzero"), arguments, keywords) if all(map(_is_off, keywords)):
            return _operand(source, arguments)
    return None


def _operand(source: ast.expr, arguments: list[ast.expr]) -> ast.expr | None:
    """X of X.f() and of torch.f(X)."""
    if is_name(source, "torch"):
        return arguments[0] if len(arguments) == 1 else None
    return None if arguments else source


def _is_off(keyword: ast.keyword) -> bool:
    return isinstance(keyword.value, ast.Constant) and keyword.value.value is False


def mask_of(hits: ast.expr) -> ast.expr | None:
    """mask of (mask.sum(...) > 0), torch.greater(mask.sum(...), 0), mask.any(...) or mask.sum(...)."""
    match hits:
        case ast.Compare(left, [ast.Gt()], [right]) if is_zero(right):
            return mask_of(left)
        case ast.Call(ast.Attribute(source, "greater" | "gt"), arguments):
            operands = arguments if is_name(source, "torch") else [source, *arguments]
            return mask_of(operands[0]) if len(operands) == 2 and is_zero(operands[1]) else None
        case ast.Call(ast.Attribute(source, "sum" | "any")) if not is_name(source, "torch"):
            return source
    return None


def selects_by(loop: ast.For, mask: ast.expr, experts: set[str]) -> bool:
    """Whether the body takes its rows by mask[e]."""
    wanted = ast.dump(mask)
    return any(
        isinstance(node, ast.Subscript) and ast.dump(node.value) == wanted and bool(experts & names_in(node.slice))
        for node in ast.walk(loop)
    )


def is_equality(node: ast.AST, index: ast.expr, expert: str) -> bool:
    """Return whether a node is the comparison `index == expert`."""
    match node:
        case ast.Compare(left, [ast.Eq()], [ast.Name(name)]):
            return name == expert and ast.dump(left) == ast.dump(index)
    return False


def is_only_index(loop: ast.For, name: str) -> bool:
    """Whether a name is read in the loop, and only as (a part of) what something is indexed by."""
    num_reads = sum(is_name(node, name) and isinstance(node.ctx, ast.Load) for node in ast.walk(loop))  # type: ignore[attr-defined]
    slices = [node.slice for node in ast.walk(loop) if isinstance(node, ast.Subscript)]
    parts = [part for index in slices for part in (index.elts if isinstance(index, ast.Tuple) else [index])]
    return 0 < num_reads == sum(is_name(part, name) for part in parts)
