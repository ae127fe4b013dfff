"""The forms of expert loops, and the order in which they are rewritten; the room's docstring has the idea.

Loops are rewritten from the inside out, each on a copy of its function: offsets become parts, branches that add zeros
go, a loop over some experts runs all, and what it skipped them for becomes a guard (`guards`). A loop with a body that
is not suited stays as it is written.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from memfine_fx.capture.source.effects import without_zero_terms
from memfine_fx.capture.source.guards import GuardRewriter, Unsuited
from memfine_fx.capture.source.helpers import PREFIX
from memfine_fx.capture.source.indices import HitIndices, UniqueIndices
from memfine_fx.capture.source.liveness import Liveness
from memfine_fx.capture.source.offsets import use_splits
from memfine_fx.capture.source.syntax import (
    assigned_names,
    assignments,
    helper_call,
    is_equality,
    is_method,
    is_name,
    is_only_index,
    loaded,
    mask_of,
    name_of,
    names_in,
    nonzero_of,
    replace_value,
    selects_by,
    stored,
    unique_of,
    unwrapped_name,
    without_methods,
)

__all__ = ["LeftAsWritten", "rewrite_function"]


@dataclass(frozen=True)
class LeftAsWritten:
    """A loop with a guard that could not be rewritten.

    Args:
        where: the line that is in the way, "file:line".
        reason: what stands there.
    """

    where: str
    reason: str


def rewrite_function(definition: ast.FunctionDef, file: str = "", left: list[LeftAsWritten] | None = None) -> bool:
    """Rewrite the loops of one function in place; return whether anything changed.

    Args:
        file: that it stands in.
        left: given the loops that stay as they are written although they have a guard.
    """
    counts = _Counts()
    current = counts.visit(copy.deepcopy(definition))
    has_changed = counts.has_changed
    for place in range(len(list(_loops_of(current)))):
        candidate = copy.deepcopy(current)
        try:
            is_rewritten = _Loop(candidate, list(_loops_of(candidate))[place], file).rewrite()
        except Unsuited as unsuited:
            if left is not None:
                left.append(LeftAsWritten(f"{file}:{unsuited.line}", str(unsuited)))
            continue
        if is_rewritten:
            current, has_changed = candidate, True
    definition.body = current.body
    return has_changed


def _loops_of(node: ast.AST) -> Iterator[ast.For]:
    """The loops of a function, inner ones first; those of functions inside of it are theirs."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _loops_of(child)
    if isinstance(node, ast.For):
        yield node


class _Counts(ast.NodeTransformer):
    """torch.bincount(ids, minlength=E) and ids.bincount(minlength=E)"""

    def __init__(self) -> None:
        self.has_changed = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(source, "bincount"), arguments, [ast.keyword("minlength")]):
                operands = arguments if is_name(source, "torch") else [source, *arguments]
                if len(operands) == 1:
                    self.has_changed = True
                    return ast.copy_location(helper_call("count", operands, node.keywords), node)
        return node


class _Loop:
    """One loop of a function, which are both changed."""

    def __init__(self, function: ast.FunctionDef, loop: ast.For, file: str) -> None:
        self._function, self._loop, self._file = function, loop, file
        self._own = function.args.args[0].arg if function.args.args else ""

    def rewrite(self) -> bool:
        """Return whether anything changed.

        Raises:
            Unsuited: a body that is skipped for some experts is not suited to be run for them.
        """
        loop = self._loop
        if loop.orelse:
            return False
        has_changed = use_splits(self._function, loop, self._file)
        written, loop.body = loop.body, without_zero_terms(loop)
        has_changed |= loop.body != written
        has_changed |= self._run_every_hit_expert(loop)
        has_changed |= self._run_every_named_expert(loop)
        has_changed |= self._keep_places_as_tensors(loop)
        return GuardRewriter(self._function, loop, self._file).rewrite() or has_changed

    def _run_every_hit_expert(self, loop: ast.For) -> bool:
        """for e in hit, where hit = (mask.sum(...) > 0).nonzero()"""
        if not isinstance(loop.target, ast.Name):
            return False
        expert = loop.target.id
        assignment = self._assignment_of(loop.iter)
        hits = nonzero_of(loop.iter if assignment is None else assignment.value)
        mask = None if hits is None else mask_of(hits)
        names = {expert, *(name for statement in loop.body if (name := unwrapped_name(statement, expert)) is not None)}
        if hits is None or mask is None or not selects_by(loop, mask, names):
            return False
        self._check_unread(expert)
        name = self._name_before(loop if assignment is None else assignment, "hits", hits)
        every = ast.copy_location(helper_call("every_expert", [loaded(name)]), hits)
        if assignment is None:
            loop.iter = every
        else:
            assignment.value = every
        body = HitIndices(loop, expert, self._own).statements()
        is_hit = ast.Subscript(loaded(name), loaded(expert), ast.Load())
        place = 1 if body and _asks_existence(body[0]) else 0
        loop.body = [*body[:place], self._skipping_unless(is_hit), *body[place:]]
        return True

    def _check_unread(self, expert: str) -> None:
        """Refuse a variable that is read behind the loop: there it names the last expert that has rows."""
        if expert in Liveness(self._function).after(self._loop):
            raise Unsuited(f"{expert} is read after a loop over the experts that have rows", self._loop)

    def _name_before(self, statement: ast.stmt, name: str, value: ast.expr) -> str:
        """A name for a value, bound before a statement."""
        name = f"{PREFIX}{name}_{statement.lineno}"
        assigned = ast.copy_location(ast.Assign([stored(name)], value), statement)
        for node in ast.walk(self._function):
            for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if isinstance(block, list) and statement in block:
                    block.insert(block.index(statement), ast.fix_missing_locations(assigned))
                    return name
        raise AssertionError("a statement of the function stands in one of its blocks")

    def _skipping_unless(self, condition: ast.expr) -> ast.If:
        skipping = ast.If(ast.UnaryOp(ast.Not(), condition), [ast.Continue()], [])
        return ast.fix_missing_locations(ast.copy_location(skipping, self._loop))

    def _assignment_of(self, source: ast.expr) -> ast.Assign | None:
        """The one assignment of a name that nothing else reads."""
        if not isinstance(source, ast.Name):
            return None
        num_uses = sum(is_name(node, source.id) for node in ast.walk(self._function))
        candidates = [
            node
            for node in ast.walk(self._function)
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and is_name(node.targets[0], source.id)
        ]
        return candidates[0] if len(candidates) == 1 and num_uses == 2 else None

    def _run_every_named_expert(self, loop: ast.For) -> bool:
        """for e in index.unique(), where rows are taken by index == e and experts by self.experts[e]"""
        assignment = self._assignment_of(loop.iter)
        index = unique_of(loop.iter if assignment is None else assignment.value)
        if index is None or not isinstance(loop.target, ast.Name):
            return False
        expert, body = _named_as_number(loop, loop.target.id)
        tables = [
            node.value
            for node in ast.walk(loop)
            if isinstance(node, ast.Subscript) and is_name(node.slice, expert) and self._own in names_in(node.value)
        ]
        if not tables or not any(is_equality(node, index, expert) for node in ast.walk(loop)):
            return False
        if assignment is not None and names_in(tables[0]) != {self._own}:
            return False  # what else it names may not be bound before the loop
        for variable in {expert, loop.target.id}:
            self._check_unread(variable)
        loop.target, loop.body = ast.copy_location(stored(expert), loop.target), body
        name = self._name_before(loop if assignment is None else assignment, "ids", index)
        arguments = [tables[0], loaded(name), ast.Constant(f"{self._file}:{loop.lineno}")]
        every = ast.copy_location(helper_call("every_index", arguments), loop.iter)
        if assignment is None:
            loop.iter = every
        else:
            assignment.value = every
        UniqueIndices(expert).visit(loop)
        is_named = ast.Compare(loaded(name), [ast.Eq()], [loaded(expert)])
        loop.body.insert(0, self._skipping_unless(ast.Call(ast.Attribute(is_named, "any", ast.Load()), [], [])))
        return True

    def _keep_places_as_tensors(self, loop: ast.For) -> bool:
        """rows = x[places.tolist()]: a list of places, used as nothing but an index, may stay a tensor."""
        assigned = {name for statement in loop.body for name in assigned_names(statement)}
        has_changed = False
        for statement in loop.body:
            for target, value in assignments(statement):
                name = name_of(target)
                if name is None or not is_method(value, ("tolist",)) or not is_only_index(loop, name):
                    continue
                places = without_methods(value, ("tolist",))
                if names_in(places) & assigned:
                    replace_value(statement, value, places)
                    has_changed = True
        return has_changed


def _named_as_number(loop: ast.For, variable: str) -> tuple[str, list[ast.stmt]]:
    """Return n and the rest of a body that begins with `n = int(e)` and reads e nowhere else; else e and the body."""
    first, rest = loop.body[0], loop.body[1:]
    name = unwrapped_name(first, variable)
    reads = any(is_name(node, variable) for statement in rest for node in ast.walk(statement))
    return (variable, loop.body) if name is None or reads or not rest else (name, rest)


def _asks_existence(statement: ast.stmt) -> bool:
    """Whether a statement skips an expert that has no weights."""
    match statement:
        case ast.If(ast.UnaryOp(ast.Not(), ast.Call(ast.Name(name))), [ast.Continue()], []):
            return name == PREFIX + "exists"
    return False
