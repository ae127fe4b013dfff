"""The syntax side of `memfine_fx.capture.loops`: which statements change, and into what."""

from __future__ import annotations

import ast
from typing import Any

from memfine_fx.capture.helpers import PREFIX

__all__ = ["rewrite_function"]


def rewrite_function(definition: ast.FunctionDef) -> bool:
    """Rewrite the loops of one function in place; whether anything changed."""
    rewriter = _LoopRewriter(definition)
    rewriter.visit(definition)
    return rewriter.has_changed


class _LoopRewriter(ast.NodeTransformer):
    def __init__(self, function: ast.FunctionDef) -> None:
        self._function = function
        self.has_changed = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """torch.bincount(ids, minlength=E)"""
        self.generic_visit(node)
        is_bincount = isinstance(node.func, ast.Attribute) and node.func.attr == "bincount"
        names = [keyword.arg for keyword in node.keywords]
        if not is_bincount or names != ["minlength"] or not isinstance(node.func, ast.Attribute):
            return node
        is_method = not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch")
        arguments = [node.func.value, *node.args] if is_method else node.args
        if len(arguments) != 1:
            return node
        self.has_changed = True
        return ast.copy_location(_call("count", arguments, node.keywords), node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if node.orelse or _counts_in_python(node):
            return node
        self._run_every_expert(node)
        self._drop_guards(node)
        return node

    def _run_every_expert(self, loop: ast.For) -> None:
        """for e in hit, where hit = (mask.sum(...) > 0).nonzero()"""
        if not isinstance(loop.target, ast.Name):
            return
        assignment = self._assignment_of(loop.iter)
        hits = _nonzero_of(loop.iter if assignment is None else assignment.value)
        mask = None if hits is None else _mask_of(hits)
        if hits is None or mask is None or not _selects_by(loop, mask, loop.target.id):
            return
        every = ast.copy_location(_call("every_expert", [hits]), hits)
        if assignment is None:
            loop.iter = every
        else:
            assignment.value = every
        body = _IndexRewriter(loop, mask)
        loop.body = body.statements()
        self.has_changed = True

    def _assignment_of(self, source: ast.expr) -> ast.Assign | None:
        """The one assignment of a name that nothing else reads."""
        if not isinstance(source, ast.Name):
            return None
        uses = [node for node in ast.walk(self._function) if isinstance(node, ast.Name) and node.id == source.id]
        found = [
            node
            for node in ast.walk(self._function)
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_name(node.targets[0], source.id)
        ]
        return found[0] if len(found) == 1 and len(uses) == 2 else None

    def _drop_guards(self, loop: ast.For) -> None:
        """if token.numel() == 0: continue"""
        made = {name for statement in loop.body for name in _assigned(statement)}
        body: list[ast.stmt] = []
        for statement in loop.body:
            guard = _guard(statement)
            if guard is None or guard[0] not in made:
                body.append(statement)
                continue
            name, inner = guard
            mark = ast.Assign([ast.Name(name, ast.Store())], _call("guarded", [ast.Name(name, ast.Load())]))
            body.append(ast.copy_location(mark, statement))
            body.extend(inner)
            self.has_changed = True
        loop.body = body


class _IndexRewriter(ast.NodeTransformer):
    """Uses of a loop variable that was a tensor of one element, [1], and is now a number."""

    def __init__(self, loop: ast.For, mask: ast.expr) -> None:
        assert isinstance(loop.target, ast.Name)
        self._mask = ast.dump(mask)
        self._name = loop.target.id
        self._loop = loop
        self._is_row = True
        self._bases: dict[str, ast.expr] = {}

    def statements(self) -> list[ast.stmt]:
        own = {name for statement in self._loop.body for name in _assigned(statement)}
        body: list[ast.stmt] = []
        for statement in self._loop.body:
            if self._unwraps(statement):
                self._is_row = False
            else:
                body.append(self.visit(statement))
        bases = [base for base in self._bases.values() if not own & _names(base)]
        if bases:
            test = ast.UnaryOp(ast.Not(), _call("exists", [ast.Name(self._name, ast.Load()), *bases]))
            body.insert(0, ast.copy_location(ast.If(test, [ast.Continue()], []), self._loop))
        return body

    def visit_Call(self, node: ast.Call) -> Any:
        """e.item() is e"""
        self.generic_visit(node)
        is_item = isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args
        return (
            node.func.value
            if is_item and isinstance(node.func, ast.Attribute) and self._is_expert(node.func.value)
            else node
        )

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if (
            self._is_row
            and self._is_expert(node.value)
            and isinstance(node.slice, ast.Constant)
            and node.slice.value == 0
        ):
            return node.value
        self.generic_visit(node)
        if not self._is_expert(node.slice) or not isinstance(node.ctx, ast.Load):
            return node
        if "self" in _names(node.value):
            self._bases.setdefault(ast.dump(node.value), node.value)
        is_mask = ast.dump(node.value) == self._mask
        entry = _call("take", [node.value, node.slice]) if self._is_row else node
        return ast.copy_location(_call("guarded", [entry]) if is_mask else entry, node)

    def _unwraps(self, statement: ast.stmt) -> bool:
        """e = e[0], e = e.item(), e = int(e)"""
        if not isinstance(statement, ast.Assign) or not _is_name(statement.targets[0], self._name):
            return False
        value = statement.value
        while (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id == "int"
            and len(value.args) == 1
        ):
            value = value.args[0]
        while (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr in ("item", "squeeze")
        ):
            value = value.func.value
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and value.slice.value == 0:
            value = value.value
        return _is_name(value, self._name)

    def _is_expert(self, node: ast.AST) -> bool:
        return _is_name(node, self._name)


def _nonzero_of(value: ast.AST) -> ast.expr | None:
    """X of X.nonzero() or torch.nonzero(X), not as a tuple."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr != "nonzero":
        return None
    is_tuple = any(not (isinstance(k.value, ast.Constant) and k.value.value is False) for k in value.keywords)
    if is_tuple:
        return None
    if _is_name(value.func.value, "torch"):
        return value.args[0] if len(value.args) == 1 else None
    return None if value.args else value.func.value


def _mask_of(hits: ast.expr) -> ast.expr | None:
    """mask of (mask.sum(...) > 0), torch.greater(mask.sum(...), 0), mask.any(...) or mask.sum(...)."""
    if isinstance(hits, ast.Compare) and len(hits.ops) == 1 and isinstance(hits.ops[0], ast.Gt):
        return _mask_of(hits.left) if _is_zero(hits.comparators[0]) else None
    if not isinstance(hits, ast.Call) or not isinstance(hits.func, ast.Attribute):
        return None
    if hits.func.attr in ("greater", "gt"):
        operands = hits.args if _is_name(hits.func.value, "torch") else [hits.func.value, *hits.args]
        return _mask_of(operands[0]) if len(operands) == 2 and _is_zero(operands[1]) else None
    return hits.func.value if hits.func.attr in ("sum", "any") and not _is_name(hits.func.value, "torch") else None


def _selects_by(loop: ast.For, mask: ast.expr, expert: str) -> bool:
    """Whether the body takes its rows by mask[e]."""
    wanted = ast.dump(mask)
    return any(
        isinstance(node, ast.Subscript) and ast.dump(node.value) == wanted and expert in _names(node.slice)
        for node in ast.walk(loop)
    )


def _guard(statement: ast.stmt) -> tuple[str, list[ast.stmt]] | None:
    """(name, statements that remain) of a condition on whether something is empty."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return None
    if len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue):
        name = _tested_for(statement.test, wants_empty=True)
        return None if name is None else (name, [])
    name = _tested_for(statement.test, wants_empty=False)
    return None if name is None else (name, statement.body)


def _tested_for(test: ast.expr, *, wants_empty: bool) -> str | None:
    """The name that a test finds empty (or not empty)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _tested_for(test.operand, wants_empty=not wants_empty)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and _is_zero(test.comparators[0]):
        operators = (ast.Eq,) if wants_empty else (ast.Gt, ast.NotEq)
        return _measured(test.left) if isinstance(test.ops[0], operators) else None
    return None if wants_empty else _measured(test)


def _measured(value: ast.expr) -> str | None:
    """x of x.numel(), x.any(), x.sum(), x.shape[0], x.size(0), len(x), each with or without .item()."""
    if isinstance(value, ast.Call) and _is_name(value.func, "len") and len(value.args) == 1:
        return value.args[0].id if isinstance(value.args[0], ast.Name) else None
    if isinstance(value, ast.Subscript) and _is_zero(value.slice) and isinstance(value.value, ast.Attribute):
        return _name_of(value.value.value) if value.value.attr == "shape" else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    attribute, source = value.func.attr, value.func.value
    if attribute == "item" and not value.args:
        return _measured(source)
    if attribute == "size" and len(value.args) == 1 and _is_zero(value.args[0]):
        return _name_of(source)
    return _name_of(source) if attribute in ("numel", "nelement", "any", "sum") and not value.args else None


def _counts_in_python(loop: ast.For) -> bool:
    """Whether the body steps a number, which would count experts that a guard skipped."""
    return any(
        isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Constant)
        for node in ast.walk(loop)
    )


def _assigned(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _name_of(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_zero(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0 and not isinstance(node.value, bool)


def _call(name: str, arguments: list[Any], keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(PREFIX + name, ast.Load()), list(arguments), keywords or [])
