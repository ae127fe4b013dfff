"""Bodies of a loop that are skipped for some experts, rewritten to be run for every expert.

    token, choice = torch.where(index == e)              token, choice = torch.where(index == e)
    if token.numel() == 0:                               own = body(token.numel(), "==", 0, True, "file:line")
        continue                                         if own.is_run:                          # yes, when traced
    out.index_add_(0, token, f(x[token]))         ->         old_loss = loss
    loss = loss + w[token, choice].mean()                    written(out, own).index_add_(0, token, f(x[token]))
                                                             loss = loss + w[token, choice].mean()
                                                             loss = merged(old_loss, loss, own)
                                                             leave(own)

No condition is believed here. While Dynamo traces, a condition on Python values is evaluated as it stands; one that
only the data decides is marked in the graph, and the body is traced. `passes.read.guards` then assumes of each such
body that its condition would have skipped it, and proves that running it changes nothing, or keeps the old value of a
name that it binds. What leaves no trace in the graph is refused: here by its syntax, in `helpers` by what Dynamo
records.

A body is suited if all that it does is to bind names and attributes and to write into tensors. Names that are read
after it is run, in the next iteration or behind the loop, are merged with what they were before.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from memfine_fx.capture.source.helpers import PREFIX
from memfine_fx.capture.source.liveness import Liveness, bound_names, surely_bound_before
from memfine_fx.capture.source.syntax import (
    assignments,
    helper_call,
    is_equality,
    is_name,
    loaded,
    name_of,
    names_in,
    stored,
    without_int,
)
from memfine_fx.compat.effects import PYTHON_EFFECTS

__all__ = ["Guard", "GuardRewriter", "Unsuited", "guard_of"]

_OPERATORS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "=="),
    ast.NotEq: ("!=", "!="),
    ast.Lt: ("<", ">"),
    ast.LtE: ("<=", ">="),
    ast.Gt: (">", "<"),
    ast.GtE: (">=", "<="),
}
"""Of a comparison with a number on the right, and of the same one with the number on the left."""
_MEASURES = ("numel", "nelement", "size", "any", "all", "sum", "count_nonzero", "max", "amax")
_REFUSED = {
    ast.Break: "a break",
    ast.Continue: "a continue",
    ast.Return: "a return",
    ast.Raise: "a raise",
    ast.Assert: "an assert",
    ast.Try: "a try",
    ast.While: "a while",
    ast.Delete: "a del",
    ast.Global: "a global",
    ast.Nonlocal: "a nonlocal",
    ast.Import: "an import",
    ast.ImportFrom: "an import",
    ast.ClassDef: "a class",
    ast.Yield: "a yield",
    ast.YieldFrom: "a yield",
    ast.Await: "an await",
    ast.AsyncFor: "an async for",
    ast.AsyncWith: "an async with",
}


class Unsuited(Exception):
    """A loop stays as it is written, because of what stands at a line of it."""

    def __init__(self, reason: str, node: ast.AST) -> None:
        super().__init__(reason)
        self.line = getattr(node, "lineno", 0)


@dataclass(frozen=True)
class Guard:
    """A condition that decides whether statements of a loop are run.

    Args:
        measure, operator, number: the condition compares the first with the last; "true" asks the first alone.
        skips_if: whether the statements are skipped where the condition holds, or else where it does not.
        body: the statements.
    """

    measure: ast.expr
    operator: str
    number: int
    skips_if: bool
    body: list[ast.stmt]


def guard_of(statement: ast.stmt, rest: Sequence[ast.stmt]) -> Guard | None:
    """Return the guard that a statement of a loop is, whose body may be the rest of the loop; None where it is none."""
    match statement:
        case ast.If(test, [ast.Continue()], []):
            return _guard(test, list(rest), is_skipped=True)
        case ast.If(test, [ast.Pass()], body) if body:
            return _guard(test, body, is_skipped=True)
        case ast.If(test, body, []):
            return _guard(test, body, is_skipped=False)
    return None


def _guard(test: ast.expr, body: list[ast.stmt], *, is_skipped: bool) -> Guard | None:
    """The guard whose body is skipped (or run) where a test holds."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            return _guard(operand, body, is_skipped=not is_skipped)
        case ast.Compare(left, [operator], [right]) if type(operator) in _OPERATORS:
            forward, backward = _OPERATORS[type(operator)]
            for measure, number, name in ((left, right, forward), (right, left, backward)):
                if type(getattr(number, "value", None)) is int and _is_measure(measure):
                    return Guard(_unwrapped(measure), name, number.value, is_skipped, body)  # type: ignore[attr-defined]
            return None
        case ast.Compare(left, [ast.In()], [right]):
            return Guard(helper_call("contains", [right, left]), "true", 0, is_skipped, body)
        case ast.Compare(left, [ast.NotIn()], [right]):
            return Guard(helper_call("contains", [right, left]), "true", 0, not is_skipped, body)
    return Guard(_unwrapped(test), "true", 0, is_skipped, body) if _is_measure(test) else None


def _asks_membership(test: ast.expr) -> bool:
    """Whether a condition is `item in values`, or not that."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.In, ast.NotIn))


def _unwrapped(value: ast.expr) -> ast.expr:
    """X of X.item(), int(X) and bool(X)."""
    while True:
        match value:
            case ast.Call(ast.Attribute(source, "item"), []) | ast.Call(ast.Name("bool"), [source]):
                value = source
            case _:
                inner = without_int(value)
                if inner is value:
                    return value
                value = inner


def _is_measure(value: ast.expr) -> bool:
    """Whether an expression may be a number of rows, or say whether there are any: only then it is marked."""
    value = _unwrapped(value)
    match value:
        case ast.Name() | ast.Call(ast.Name("len"), [_]):
            return True  # of a name `GuardRewriter` asks what it was assigned
        case ast.Call(ast.Attribute(_, name)):
            return name in _MEASURES
        case ast.Subscript(ast.Attribute(_, "shape"), ast.Constant()) | ast.Subscript(ast.Name(), ast.Name()):
            return True
    return False


class GuardRewriter:
    """Rewrites the guards of one loop.

    Args:
        function: that holds the loop.
        loop: whose body is rewritten in place.
        file: that the function stands in, for reports.
    """

    def __init__(self, function: ast.FunctionDef, loop: ast.For, file: str) -> None:
        self._function, self._loop, self._file = function, loop, file
        self._made = bound_names([loop])
        self._num_guards = 0
        self._liveness = Liveness(function)

    def rewrite(self) -> bool:
        """Rewrite the body; return whether it has any guard.

        Raises:
            Unsuited: a body does something that cannot be undone for an expert without rows. Then the function is
                changed in parts, and is to be thrown away.
        """
        body = self._block(self._loop.body, is_guarded=False)
        if self._num_guards:
            self._loop.body = body
        return bool(self._num_guards)

    def _block(self, statements: Sequence[ast.stmt], *, is_guarded: bool) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for place, statement in enumerate(statements):
            rest = statements[place + 1 :]
            guard = self._guard_of(statement, rest)
            if guard is not None:
                result += self._guarded(statement, guard)
            elif _only_continues(statement) and (is_guarded or self._has_guard(rest)):
                # As a branch, so that what follows a guarded body is reached.
                branch = ast.If(statement.test, [ast.Pass()], self._block(rest, is_guarded=is_guarded))  # type: ignore[attr-defined]  # an if
                result.append(ast.fix_missing_locations(ast.copy_location(branch, statement)))
            else:
                result.append(statement)
            if _only_continues(statement) and result[-1] is not statement:
                return result
        return result

    def _guard_of(self, statement: ast.stmt, rest: Sequence[ast.stmt]) -> Guard | None:
        guard = guard_of(statement, rest)
        if guard is None or not names_in(guard.measure) & self._made:
            return None
        if isinstance(statement, ast.If) and _asks_membership(statement.test) and not self._compares(guard.measure):
            return None
        return guard if not isinstance(guard.measure, ast.Name) or self._is_measured(guard.measure.id) else None

    def _is_measured(self, name: str) -> bool:
        """Whether a name is a count that the loop runs over (`enumerate(counts)`), or is assigned a measure."""
        if isinstance(self._loop.target, ast.Tuple) and any(is_name(part, name) for part in self._loop.target.elts[1:]):
            return True
        pairs = [pair for node in ast.walk(self._loop) if isinstance(node, ast.Assign) for pair in assignments(node)]
        return any(is_name(target, name) and _is_measure(value) for target, value in pairs)

    def _compares(self, measure: ast.expr) -> bool:
        """Whether the loop compares what `item in values` asks about: of layers' numbers in a list nothing is asked."""
        assert isinstance(measure, ast.Call)
        values, item = measure.args
        name = name_of(item)
        return name is not None and any(is_equality(node, values, name) for node in ast.walk(self._loop))

    def _has_guard(self, statements: Sequence[ast.stmt]) -> bool:
        return any(self._guard_of(statement, statements[place + 1 :]) for place, statement in enumerate(statements))

    def _guarded(self, statement: ast.stmt, guard: Guard) -> list[ast.stmt]:
        """Return the condition as a mark, and its body with its effects made visible."""
        if not PYTHON_EFFECTS.holds():
            raise Unsuited("what a body changes in Python cannot be seen in this version of torch", statement)
        self._num_guards += 1
        if not guard.body:
            return [ast.copy_location(ast.Pass(), statement)]
        own = f"{PREFIX}body_{self._num_guards}"
        condition = (guard.operator, guard.number, guard.skips_if, f"{self._file}:{statement.lineno}")
        decided = ast.Assign(
            [stored(own)], helper_call("body", [guard.measure, *[ast.Constant(part) for part in condition]])
        )
        is_run = ast.Attribute(loaded(own), "is_run", ast.Load())
        result = [decided, ast.If(is_run, self._body(guard.body, own), [])]
        return [ast.fix_missing_locations(ast.copy_location(node, statement)) for node in result]

    def _body(self, statements: list[ast.stmt], own: str) -> list[ast.stmt]:
        paths = _check_suited(statements)
        _check_iterators(self._function, statements)
        collected = {name for name in names_in(self._function) if _is_collected(self._function, name)}
        after = self._liveness.after(statements[-1])
        names = sorted(bound_names(statements) & after)
        bound = surely_bound_before(self._function, statements[0])
        for name in names:
            if name not in bound:
                raise Unsuited(f"{name} is read after a body that is skipped, and was not bound before", statements[0])
        olds = [*map(loaded, names), *paths]
        inner = [_Visible(own, collected).visit(node) for node in self._block(statements, is_guarded=True)]
        named = [(f"{own}_old_{place}", old) for place, old in enumerate(olds)]
        before = [ast.Assign([stored(name)], _as_load(old)) for name, old in named]
        binding = {key: node for statement in statements for key, node in _bindings(statement)}  # the last one of each
        merged = [
            ast.copy_location(
                ast.Assign([_as_store(old)], helper_call("merged", [loaded(name), _as_load(old), loaded(own)])),
                binding.get(ast.unparse(old), statements[-1]),  # a refusal of the two values names this line
            )
            for name, old in named
        ]
        leave = ast.Expr(helper_call("leave", [loaded(own)]))
        first, last = statements[0], statements[-1]
        return [
            *(ast.copy_location(node, first) for node in before),
            *inner,
            *merged,
            ast.copy_location(leave, last),
        ]


def _only_continues(statement: ast.stmt) -> bool:
    match statement:
        case ast.If(_, [ast.Continue()], []):
            return True
    return False


def _check_suited(statements: Sequence[ast.stmt]) -> list[ast.Attribute]:
    """Return the attributes that some statements bind, once each.

    Raises:
        Unsuited: they do something else than to bind names and attributes and to write into tensors.
    """
    paths: dict[str, ast.Attribute] = {}
    bound = bound_names(statements)
    continues = [node.body[0] for node in statements if _only_continues(node)]  # type: ignore[attr-defined]  # ifs
    for node in _own_nodes(statements):
        if node in continues or _is_in_loop_of(statements, node):
            continue
        if type(node) in _REFUSED:
            raise Unsuited(f"a body that is skipped holds {_REFUSED[type(node)]}", node)
        match node:
            case ast.Expr(ast.Constant()) | ast.Expr(ast.Call(ast.Attribute())):
                pass
            case ast.Expr(value):
                raise Unsuited(f"`{ast.unparse(value)}` is called for what it does, in a body that is skipped", node)
            case ast.Attribute(ctx=ast.Store()):
                root = _root_of(node)
                if root is None or root in bound:
                    raise Unsuited(f"`{ast.unparse(node)}` is written, in a body that is skipped", node)
                paths.setdefault(ast.unparse(node), node)
    return list(paths.values())


def _bindings(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names and attributes that a statement binds, as text, each with where it is bound."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node), node


def _check_iterators(function: ast.FunctionDef, statements: Sequence[ast.stmt]) -> None:
    """Refuse statements that may advance an iterator which is not theirs: it would be ahead of an expert with rows.

    Raises:
        Unsuited: they call `next`, or read a name of an iterator, or iterate over a name that may be of one.
    """
    bound = bound_names(statements)
    values = [pair for node in ast.walk(function) if isinstance(node, ast.stmt) for pair in assignments(node)]
    iterators = {name_of(target) for target, value in values if _is_iterator(value)} - bound
    sequences = {name_of(target) for target, value in values if _is_sequence(value)}
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and is_name(call.func, "iter"):
            raise Unsuited("an iterator is made, which a body may advance that is skipped", call)
    for node in (inner for statement in statements for inner in ast.walk(statement)):
        match node:
            case ast.Call(ast.Name("next")) | ast.Call(ast.Attribute(attr="__next__" | "send")):
                raise Unsuited("an iterator is advanced in a body that is skipped", node)
            case ast.Name(name) if name in iterators:
                raise Unsuited(f"{name}, an iterator, is read in a body that is skipped", node)
            case (ast.For(iter=ast.Name(name)) | ast.comprehension(iter=ast.Name(name))) as loop:
                if name not in bound and name not in sequences:
                    raise Unsuited(f"{name} may be an iterator that a body advances which is skipped", loop.iter)


def _is_iterator(value: ast.expr) -> bool:
    match value:
        case ast.GeneratorExp() | ast.Call(ast.Name("iter" | "zip" | "enumerate" | "reversed" | "map" | "filter")):
            return True
        case ast.Call(ast.Attribute(source, name)):
            return is_name(source, "itertools") or name in ("__iter__", "parameters", "modules", "children")
    return False


def _is_sequence(value: ast.expr) -> bool:
    match value:
        case ast.List() | ast.Tuple() | ast.ListComp() | ast.Call(ast.Name("range" | "list" | "tuple" | "sorted")):
            return True
        case ast.Call(ast.Attribute(_, name)):
            return name in ("tolist", "split", "chunk", "unbind", "tensor_split")
    return False


def _is_collected(function: ast.FunctionDef, name: str) -> bool:
    """Whether a name is a list that is only appended to and put together: a tensor without rows adds nothing to it.

    `torch.cat(parts) if len(parts) else x` counts as putting it together.
    """
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    num_lists = 0
    for node in ast.walk(function):
        if not is_name(node, name):
            continue
        match parents[node], parents.get(parents[node]):
            case ast.Assign([ast.Name()], ast.List([])), _:
                num_lists += 1
            case ast.Tuple(targets), ast.Assign([_], ast.Tuple(values)) as assign if parents[node] is assign.targets[0]:
                if not isinstance(values[targets.index(node)], ast.List) or values[targets.index(node)].elts:  # type: ignore[attr-defined,arg-type]  # a list
                    return False
                num_lists += 1
            case ((ast.Attribute(attr="append") as method), ast.Call(func)) if func is method:
                pass
            case ast.Call(ast.Attribute(ast.Name("torch"), "cat" | "concat"), [first, *_]), _ if first is node:
                pass
            case ast.Call(ast.Name("len")) as call, ast.IfExp(test, body) if test is call and _puts_together(
                body, name
            ):
                pass
            case ast.IfExp(test, body), _ if test is node and _puts_together(body, name):
                pass
            case _:
                return False
    return num_lists == 1


def _puts_together(value: ast.expr, name: str) -> bool:
    match value:
        case ast.Call(ast.Attribute(ast.Name("torch"), "cat" | "concat"), [ast.Name(first), *_]):
            return first == name
    return False


def _own_nodes(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Every node of some statements, but for the bodies of functions that they define."""
    for statement in statements:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _own_nodes(list(ast.iter_child_nodes(statement)))


def _is_in_loop_of(statements: Sequence[ast.stmt], jump: ast.AST) -> bool:
    """Whether a node is a break or continue about a loop that stands among the statements."""
    if not isinstance(jump, (ast.Break, ast.Continue)):
        return False
    loops = [node for node in _own_nodes(statements) if isinstance(node, ast.For)]
    return any(inner is jump for loop in loops for statement in loop.body for inner in ast.walk(statement))


def _root_of(node: ast.expr) -> str | None:
    """x of x.a.b"""
    while isinstance(node, ast.Attribute):
        node = node.value
    return name_of(node)


def _as_load(node: ast.expr) -> ast.expr:
    return ast.Attribute(node.value, node.attr, ast.Load()) if isinstance(node, ast.Attribute) else loaded(node.id)  # type: ignore[attr-defined]


def _as_store(node: ast.expr) -> ast.expr:
    return ast.Attribute(node.value, node.attr, ast.Store()) if isinstance(node, ast.Attribute) else stored(node.id)  # type: ignore[attr-defined]


class _Visible(ast.NodeTransformer):
    """Makes what a body writes pass a helper: only tensors may be written to, and one entry keeps its old value.

    Args:
        own: the name of the body's record.
        collected: names of lists of tensors that are put together behind the loop.
    """

    def __init__(self, own: str, collected: Collection[str]) -> None:
        self._own, self._collected = own, collected

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Assign([ast.Subscript(base, index)], value) if not isinstance(index, (ast.Tuple, ast.Slice)):
                arguments = [self._written(base), index, value, loaded(self._own)]
                return ast.copy_location(ast.Expr(helper_call("store", arguments)), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Store):
            node.value = self._written(node.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        match node.value:
            case ast.Call(ast.Attribute(ast.Name(name), "append"), [value], []) if name in self._collected:
                node.value = helper_call("collect", [loaded(name), value, loaded(self._own)])
            case ast.Call(ast.Attribute(receiver) as method):
                method.value = self._written(receiver)
        return node

    def _written(self, value: ast.expr) -> ast.expr:
        if isinstance(value, ast.Call) and name_of(value.func) == PREFIX + "written":
            return value  # it stands in the body of another guard too
        return ast.copy_location(helper_call("written", [value, loaded(self._own)]), value)
