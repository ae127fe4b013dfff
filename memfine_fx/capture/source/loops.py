"""The forms of expert loops, and the order in which they are rewritten; the room's docstring has the idea.

A loop is visited from the inside out: offsets become parts, branches that add zeros go, and if nothing is left that an
expert without rows would do (`effects`), the loop runs every expert and marks what it was skipped for.
"""

from __future__ import annotations

import ast

from memfine_fx.capture.source.effects import acts_without_rows, without_zero_terms
from memfine_fx.capture.source.helpers import PREFIX
from memfine_fx.capture.source.indices import HitIndices, UniqueIndices
from memfine_fx.capture.source.offsets import use_splits
from memfine_fx.capture.source.syntax import (
    assigned_names,
    assignments,
    count_guard,
    emptiness_guard,
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

__all__ = ["rewrite_function"]


def rewrite_function(definition: ast.FunctionDef) -> bool:
    """Rewrite the loops of one function in place; whether anything changed."""
    rewriter = _LoopRewriter(definition)
    rewriter.visit(definition)
    _drop_unread(definition, rewriter.dropped_counts)
    return rewriter.has_changed


def _drop_unread(definition: ast.FunctionDef, names: set[str]) -> None:
    """Drop assignments of counts that only guards read: a list of them would take the counts to the host."""
    read = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in ast.walk(definition):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                body[:] = [one for one in body if not _assigns_only(one, names - read)]


def _assigns_only(statement: ast.stmt, names: set[str]) -> bool:
    match statement:
        case ast.Assign([ast.Name(name)]):
            return name in names
    return False


class _LoopRewriter(ast.NodeTransformer):
    def __init__(self, function: ast.FunctionDef) -> None:
        self._function = function
        self._own = function.args.args[0].arg if function.args.args else ""
        self.has_changed = False
        self.dropped_counts: set[str] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """torch.bincount(ids, minlength=E) and ids.bincount(minlength=E)"""
        self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(source, "bincount"), arguments, [ast.keyword("minlength")]):
                operands = arguments if is_name(source, "torch") else [source, *arguments]
                if len(operands) == 1:
                    self.has_changed = True
                    return ast.copy_location(helper_call("count", operands, node.keywords), node)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if node.orelse:
            return node
        self.has_changed |= use_splits(self._function, node)
        body = without_zero_terms(node)
        if acts_without_rows(ast.For(node.target, node.iter, body, [])):
            return node
        node.body = body  # what guarded the dropped branches goes below
        self._run_every_hit_expert(node)
        self._run_every_named_expert(node)
        self._mark_guards(node)
        self._drop_count_guards(node)
        self._keep_places_as_tensors(node)
        return node

    def _run_every_hit_expert(self, loop: ast.For) -> None:
        """for e in hit, where hit = (mask.sum(...) > 0).nonzero()"""
        if not isinstance(loop.target, ast.Name):
            return
        expert = loop.target.id
        assignment = self._assignment_of(loop.iter)
        hits = nonzero_of(loop.iter if assignment is None else assignment.value)
        mask = None if hits is None else mask_of(hits)
        names = {expert, *(name for one in loop.body if (name := unwrapped_name(one, expert)) is not None)}
        if hits is None or mask is None or not selects_by(loop, mask, names):
            return
        every = ast.copy_location(helper_call("every_expert", [hits]), hits)
        if assignment is None:
            loop.iter = every
        else:
            assignment.value = every
        loop.body = HitIndices(loop, expert, mask, self._own).statements()
        self.has_changed = True

    def _assignment_of(self, source: ast.expr) -> ast.Assign | None:
        """The one assignment of a name that nothing else reads."""
        if not isinstance(source, ast.Name):
            return None
        num_uses = sum(is_name(node, source.id) for node in ast.walk(self._function))
        found = [
            node
            for node in ast.walk(self._function)
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and is_name(node.targets[0], source.id)
        ]
        return found[0] if len(found) == 1 and num_uses == 2 else None

    def _run_every_named_expert(self, loop: ast.For) -> None:
        """for e in index.unique(), where rows are taken by index == e and experts by self.experts[e]"""
        index = unique_of(loop.iter)
        if index is None or not isinstance(loop.target, ast.Name):
            return
        expert = loop.target.id
        tables = [
            node.value
            for node in ast.walk(loop)
            if isinstance(node, ast.Subscript) and is_name(node.slice, expert) and self._own in names_in(node.value)
        ]
        if not tables or not any(is_equality(node, index, expert) for node in ast.walk(loop)):
            return
        loop.iter = ast.copy_location(helper_call("every_index", [tables[0]]), loop.iter)
        UniqueIndices(index, expert).visit(loop)
        self.has_changed = True

    def _mark_guards(self, loop: ast.For) -> None:
        """if token.numel() == 0: continue"""
        made = {name for statement in loop.body for name in assigned_names(statement)}
        body: list[ast.stmt] = []
        for statement in loop.body:
            guard = emptiness_guard(statement)
            if guard is None or guard[0] not in made:
                body.append(statement)
                continue
            name, inner = guard
            mark = ast.Assign([stored(name)], helper_call("guarded", [loaded(name)]))
            body += [ast.copy_location(mark, statement), *inner]
            self.has_changed = True
        loop.body = body

    def _drop_count_guards(self, loop: ast.For) -> None:
        """if counts[e] == 0: continue, where counts = bincount(index).tolist() and rows are those of index == e"""
        body: list[ast.stmt] = []
        for statement in loop.body:
            guard = count_guard(statement)
            index = None if guard is None else self._counted_by(guard[0])
            if guard is None or index is None or not any(is_equality(one, index, guard[1]) for one in ast.walk(loop)):
                body.append(statement)
                continue
            self.dropped_counts.add(guard[0])
            body += guard[2]
            self.has_changed = True
        loop.body = body

    def _counted_by(self, counts: str) -> ast.expr | None:
        """X of the one `counts = torch.bincount(X.flatten(), ...)`, where X is a name that is assigned once."""
        values = self._assigned_values(counts)
        if len(values) != 1:
            return None
        match without_methods(values[0], ("tolist", "cpu", "numpy", "to")):
            case ast.Call(ast.Name(name), [index, *_]) if name == PREFIX + "count":
                pass
            case ast.Call(ast.Attribute(_, "bincount"), [index, *_]):
                pass
            case _:
                return None
        index = without_methods(index, ("flatten", "view", "reshape"))
        return index if isinstance(index, ast.Name) and len(self._assigned_values(index.id)) <= 1 else None

    def _assigned_values(self, name: str) -> list[ast.expr]:
        """What a name is assigned; a name that is also bound otherwise counts twice."""
        nodes = list(ast.walk(self._function))
        num_stores = sum(is_name(node, name) and isinstance(node.ctx, ast.Store) for node in nodes)  # type: ignore[attr-defined]
        values = [
            node.value
            for node in nodes
            if isinstance(node, ast.Assign) and any(is_name(target, name) for target in node.targets)
        ]
        return values if len(values) == num_stores else values * 2

    def _keep_places_as_tensors(self, loop: ast.For) -> None:
        """rows = x[places.tolist()]: a list of places, used as nothing but an index, may stay a tensor."""
        made = {name for statement in loop.body for name in assigned_names(statement)}
        for statement in loop.body:
            for target, value in assignments(statement):
                name = name_of(target)
                if name is None or not is_method(value, ("tolist",)) or not is_only_index(loop, name):
                    continue
                places = without_methods(value, ("tolist",))
                if names_in(places) & made:
                    replace_value(statement, value, places)
                    self.has_changed = True
