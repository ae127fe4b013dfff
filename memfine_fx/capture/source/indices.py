"""Uses of a loop variable that was a tensor naming an expert, and is now the expert's number."""

from __future__ import annotations

import ast

from memfine_fx.capture.source.syntax import (
    assigned_names,
    helper_call,
    is_name,
    is_zero,
    loaded,
    name_of,
    names_in,
    stored,
    unwrapped_name,
)

__all__ = ["HitIndices", "UniqueIndices"]


class HitIndices(ast.NodeTransformer):
    """e of `for e in (mask.sum(...) > 0).nonzero()`, a tensor of one element.

    Args:
        loop: the loop.
        expert: its variable.
        own: what the method calls its module.
    """

    def __init__(self, loop: ast.For, expert: str, own: str) -> None:
        self._own = own
        self._name = expert
        self._others: set[str] = set()
        self._loop = loop
        self._is_row = True
        self._bases: dict[str, ast.expr] = {}
        self._is_conditional = False

    def statements(self) -> list[ast.stmt]:
        """The body, for every expert that has weights."""
        own = {name for statement in self._loop.body for name in assigned_names(statement)}
        body: list[ast.stmt] = []
        for statement in self._loop.body:
            name = unwrapped_name(statement, self._name)
            if name == self._name:
                self._is_row = False
            elif name is not None:
                self._others.add(name)
                body.append(ast.copy_location(ast.Assign([stored(name)], loaded(self._name)), statement))
            else:
                body.append(self.visit(statement))
        bases = [base for base in self._bases.values() if not own & names_in(base)]
        if bases:  # one_hot with a class more than there are experts: padding that hits nothing
            test = ast.UnaryOp(ast.Not(), helper_call("exists", [loaded(self._name), *bases]))
            body.insert(0, ast.copy_location(ast.If(test, [ast.Continue()], []), self._loop))
        return body

    def visit_If(self, node: ast.If) -> ast.AST:
        return self._visit_conditional(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._visit_conditional(node)

    def _visit_conditional(self, node: ast.AST) -> ast.AST:
        """Visit a conditional node without requiring the weights that its branches read to exist for every expert.

        An expert without weights may take the other branch.
        """
        before, self._is_conditional = self._is_conditional, True
        self.generic_visit(node)
        self._is_conditional = before
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """e.item() is e"""
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(source, "item"), []) if self._is_expert(source):
                return source
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is_row and self._is_expert(node.value) and is_zero(node.slice):
            return node.value
        self.generic_visit(node)
        if not self._is_expert(node.slice) or not isinstance(node.ctx, ast.Load):
            return node
        if self._own in names_in(node.value) and not self._is_conditional:
            self._bases.setdefault(ast.dump(node.value), node.value)
        is_row = self._is_row and is_name(node.slice, self._name)
        return ast.copy_location(helper_call("take", [node.value, node.slice]), node) if is_row else node

    def _is_expert(self, node: ast.AST) -> bool:
        return name_of(node) in {self._name, *self._others}


class UniqueIndices(ast.NodeTransformer):
    """e of `for e in index.unique()`, an id: takes e.item() and int(e) for e."""

    def __init__(self, expert: str) -> None:
        self._expert = expert

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(ast.Name(name), "item")) | ast.Call(ast.Name("int"), [ast.Name(name)]):
                return loaded(name) if name == self._expert else node
        return node
