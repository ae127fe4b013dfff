"""Which names a function still reads after a statement, and which it has surely bound before one.

Both are conservative. A name counts as read wherever some path may read it before it is bound again: names that nested
functions read count as read everywhere, and inside a `try` nothing counts as bound again. A name counts as bound before
a statement only if every path to the statement binds it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Liveness", "bound_names", "surely_bound_before"]

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class _Jumps:
    """Names that are live where `continue` and `break` lead to."""

    at_head: frozenset[str] = frozenset()
    after_loop: frozenset[str] = frozenset()


class Liveness:
    """Names that are live after each statement of a function.

    Args:
        function: its syntax; not changed.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        self._after: dict[ast.stmt, frozenset[str]] = {}
        self._captured = frozenset(
            name for node in ast.walk(function) if isinstance(node, _SCOPES) and node is not function
            for name in _loads(node)
        )  # fmt: skip
        self._block(function.body, frozenset(), _Jumps())

    def after(self, statement: ast.stmt) -> frozenset[str]:
        """Return the names that may be read after a statement of the function before they are bound again."""
        return self._after.get(statement, frozenset()) | self._captured

    def _block(self, statements: Sequence[ast.stmt], after: frozenset[str], jumps: _Jumps) -> frozenset[str]:
        """Return the names that are live before some statements, given those that are live after them."""
        for statement in reversed(statements):
            self._after[statement] = self._after.get(statement, frozenset()) | after
            after = self._before(statement, after, jumps)
        return after

    def _before(self, node: ast.stmt, after: frozenset[str], jumps: _Jumps) -> frozenset[str]:
        match node:
            case ast.Return() | ast.Raise():
                return _loads(node)
            case ast.Continue():
                return jumps.at_head
            case ast.Break():
                return jumps.after_loop
            case ast.If(test, body, otherwise):
                return _loads(test) | self._block(body, after, jumps) | self._block(otherwise, after, jumps)
            case ast.For(target, source, body, otherwise) | ast.AsyncFor(target, source, body, otherwise):
                return _loads(source) | self._loop(body, otherwise, after, jumps, frozenset(bound_names([target])))
            case ast.While(test, body, otherwise):
                return _loads(test) | self._loop(body, otherwise, after, jumps, frozenset(), _loads(test))
            case ast.With(items, body) | ast.AsyncWith(items, body):
                names = frozenset(bound_names([item.optional_vars for item in items if item.optional_vars]))
                expressions = [item.context_expr for item in items]
                # A context manager may swallow an exception: then nothing in the body is surely bound. torch's do not.
                skipped = frozenset() if all(map(_is_of_torch, expressions)) else after
                before = (self._block(body, after, jumps) - names) | skipped
                return before.union(*map(_loads, expressions))
            case ast.Try():
                return _loads(node) | self._try(node, after, jumps)
            case _:
                return (after - _surely_bound(node)) | _loads(node)

    def _loop(
        self,
        body: Sequence[ast.stmt],
        otherwise: Sequence[ast.stmt],
        after: frozenset[str],
        jumps: _Jumps,
        targets: frozenset[str],
        test: frozenset[str] = frozenset(),
    ) -> frozenset[str]:
        """Return the names that are live at the head of a loop, before its first and every later iteration."""
        end = self._block(otherwise, after, jumps)
        head = end | test
        while True:
            inside = self._block(body, head, _Jumps(head, after)) - targets
            if inside <= head:
                return head
            head |= inside

    def _try(self, node: ast.Try, after: frozenset[str], jumps: _Jumps) -> frozenset[str]:
        handlers = [handler.body for handler in node.handlers]
        # Any statement may raise, so whatever is live in a handler or behind it is live at each of them.
        escape = after.union(*(self._block(body, after, jumps) for body in (node.finalbody, node.orelse, *handlers)))
        live = escape
        for statement in reversed(node.body):
            self._after[statement] = self._after.get(statement, frozenset()) | live
            live |= self._before(statement, live, jumps)
        return live


def _is_of_torch(node: ast.expr) -> bool:
    """Whether an expression calls something by a name in torch, such as `torch.no_grad()`."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def bound_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that some statements or targets bind in their own scope, on any path."""
    return {name for node in nodes for name in _stores(node)}


def _stores(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(name, ast.Store() | ast.Del()):
            yield name
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            yield name
            return
        case ast.Lambda():
            return
        case ast.Import(names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
        case (
            ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name)
        ):
            yield name
        case _ if isinstance(node, _COMPREHENSIONS):  # its targets are its own, a walrus inside is not
            yield from (inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
            return
    for child in ast.iter_child_nodes(node):
        yield from _stores(child)


def _surely_bound(statement: ast.stmt) -> frozenset[str]:
    """Return the names that a simple statement binds whenever it is run."""
    match statement:
        case ast.Assign(targets):
            return frozenset(name for target in targets for name in _bare(target))
        case ast.AnnAssign(target, value=ast.expr()):
            return frozenset(_bare(target))
        case ast.FunctionDef(name) | ast.ClassDef(name):
            return frozenset((name,))
        case ast.Import() | ast.ImportFrom():
            return frozenset(_stores(statement))
    return frozenset()


def _bare(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Name(name):
            yield name
        case ast.Tuple(parts) | ast.List(parts):
            for part in parts:
                yield from _bare(part)
        case ast.Starred(value):
            yield from _bare(value)


def _loads(node: ast.AST) -> frozenset[str]:
    """Return the names that a node may read; what it adds to in place is read too."""
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Store)]
    added = [inner.target for inner in ast.walk(node) if isinstance(inner, ast.AugAssign)]
    return frozenset(name.id for name in (*names, *added) if isinstance(name, ast.Name))


def surely_bound_before(function: ast.FunctionDef, statement: ast.stmt) -> set[str]:
    """Return the names that are bound on every path to a statement of the function.

    Counted are parameters, and what stands before the statement, or before a loop or branch around it, without a
    condition.
    """
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = {parameter.arg for parameter in parameters if parameter is not None}
    return names | (_bound_on_the_way(function.body, statement) or set())


def _bound_on_the_way(block: Sequence[ast.stmt], statement: ast.stmt) -> set[str] | None:
    """Return the names that are surely bound in a block before a statement in it; None where it is elsewhere."""
    names: set[str] = set()
    for node in block:
        if node is statement:
            return names
        for inner in _blocks(node):
            bound = _bound_on_the_way(inner, statement)
            if bound is not None:
                targets = bound_names([node.target]) if isinstance(node, ast.For) else set()
                return names | targets | bound
        names |= _bound_by(node)
    return None


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and not isinstance(node, _SCOPES):
            yield block
    for handler in getattr(node, "handlers", ()):
        yield handler.body


def _bound_by(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds on every path through it."""
    match node:
        case ast.If(_, body, otherwise) if body and otherwise:
            branches = [set().union(*map(_bound_by, branch)) for branch in (body, otherwise) if not _leaves(branch)]
            return set.intersection(*branches) if branches else set()
        case ast.With(items, body):
            names = bound_names([item.optional_vars for item in items if item.optional_vars])
            return names.union(*map(_bound_by, body))
    return set(_surely_bound(node))


def _leaves(block: Sequence[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))
