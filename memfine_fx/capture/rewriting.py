"""The syntax side of `memfine_fx.capture.loops`: which statements change, and into what."""

from __future__ import annotations

import ast
from typing import Any

from memfine_fx.capture.helpers import PREFIX
from memfine_fx.capture.offsets import use_splits
from memfine_fx.capture.syntax import (
    acts_without_rows,
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
    unique_of,
    unwrapped_name,
)
from memfine_fx.capture.zero_terms import without_zero_terms

__all__ = ["rewrite_function"]


def rewrite_function(definition: ast.FunctionDef) -> bool:
    """Rewrite the loops of one function in place; whether anything changed."""
    rewriter = _LoopRewriter(definition)
    rewriter.visit(definition)
    _drop_unread(definition, rewriter.dropped_counts)
    return rewriter.has_changed


def _drop_unread(definition: ast.FunctionDef, names: set[str]) -> None:
    """Drop assignments of counts that only guards read."""
    read = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in ast.walk(definition):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                body[:] = [one for one in body if not _assigns_only(one, names - read)]


def _assigns_only(statement: ast.stmt, names: set[str]) -> bool:
    is_single = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    return is_single and isinstance(statement, ast.Assign) and name_of(statement.targets[0]) in names


class _LoopRewriter(ast.NodeTransformer):
    def __init__(self, function: ast.FunctionDef) -> None:
        self._function = function
        self._own = function.args.args[0].arg if function.args.args else ""
        self.has_changed = False
        self.dropped_counts: set[str] = set()

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
        return ast.copy_location(helper_call("count", arguments, node.keywords), node)

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        if node.orelse:
            return node
        hoisted = _hoisted_counts(node)
        self.has_changed |= use_splits(self._function, node)
        body = without_zero_terms(node)
        if acts_without_rows(ast.For(node.target, node.iter, body, [])):
            return node if hoisted is None else [hoisted, node]
        node.body = body  # what guarded the dropped branches goes below
        self._run_every_expert(node)
        self._run_every_named_expert(node)
        self._drop_guards(node)
        self._drop_count_guards(node)
        self._keep_places_as_tensors(node)
        return node if hoisted is None else [hoisted, node]

    def _run_every_expert(self, loop: ast.For) -> None:
        """for e in hit, where hit = (mask.sum(...) > 0).nonzero()"""
        if not isinstance(loop.target, ast.Name):
            return
        assignment = self._assignment_of(loop.iter)
        hits = nonzero_of(loop.iter if assignment is None else assignment.value)
        mask = None if hits is None else mask_of(hits)
        names = {loop.target.id, *_other_names(loop)}
        if hits is None or mask is None or not selects_by(loop, mask, names):
            return
        every = ast.copy_location(helper_call("every_expert", [hits]), hits)
        if assignment is None:
            loop.iter = every
        else:
            assignment.value = every
        body = _IndexRewriter(loop, mask, self._own)
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
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and is_name(node.targets[0], source.id)
        ]
        return found[0] if len(found) == 1 and len(uses) == 2 else None

    def _run_every_named_expert(self, loop: ast.For) -> None:
        """for e in index.unique(), where rows are taken by index == e and experts by self.experts[e]"""
        index = unique_of(loop.iter)
        if index is None or not isinstance(loop.target, ast.Name):
            return
        expert = loop.target.id
        masks = [node for node in ast.walk(loop) if is_equality(node, index, expert)]
        tables = [
            node.value
            for node in ast.walk(loop)
            if isinstance(node, ast.Subscript) and is_name(node.slice, expert) and self._own in names_in(node.value)
        ]
        if not masks or not tables:
            return
        loop.iter = ast.copy_location(helper_call("every_index", [tables[0]]), loop.iter)
        _UniqueRewriter(index, expert).visit(loop)
        self.has_changed = True

    def _drop_count_guards(self, loop: ast.For) -> None:
        """if counts[e] == 0: continue, where counts = bincount(index).tolist() and rows are those of index == e"""
        body: list[ast.stmt] = []
        for statement in loop.body:
            guard = count_guard(statement)
            index = None if guard is None else self._counted_by(guard[0])
            is_own = (
                index is not None
                and guard is not None
                and any(is_equality(node, index, guard[1]) for node in ast.walk(loop))
            )
            if guard is None or not is_own:
                body.append(statement)
                continue
            self.dropped_counts.add(guard[0])
            body.extend(guard[2])
            self.has_changed = True
        loop.body = body

    def _counted_by(self, counts: str) -> ast.expr | None:
        """X of the one `counts = torch.bincount(X.flatten(), ...)`, where X is a name that is assigned once."""
        values = self._assigned_values(counts)
        value: ast.expr | None = values[0] if len(values) == 1 else None
        while is_method(value, ("tolist", "cpu", "numpy", "to")):
            value = value.func.value  # type: ignore[union-attr]  # a method's call
        if not isinstance(value, ast.Call) or not value.args:
            return None
        is_rewritten = is_name(value.func, PREFIX + "count")
        if not is_rewritten and not (isinstance(value.func, ast.Attribute) and value.func.attr == "bincount"):
            return None
        index = value.args[0]
        while is_method(index, ("flatten", "view", "reshape")):
            index = index.func.value  # type: ignore[attr-defined]  # a method's call
        return index if isinstance(index, ast.Name) and len(self._assigned_values(index.id)) <= 1 else None

    def _assigned_values(self, name: str) -> list[ast.expr]:
        """What a name is assigned; a name that is also bound otherwise counts twice."""
        stores = [
            node
            for node in ast.walk(self._function)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        ]
        values = [
            node.value
            for node in ast.walk(self._function)
            if isinstance(node, ast.Assign) and any(is_name(target, name) for target in node.targets)
        ]
        return values if len(values) == len(stores) else values * 2

    def _keep_places_as_tensors(self, loop: ast.For) -> None:
        """rows = x[places.tolist()]: a list of places, used as nothing but an index, may stay a tensor."""
        made = {name for statement in loop.body for name in assigned_names(statement)}
        for statement in loop.body:
            for target, value in assignments(statement):
                is_list = is_method(value, ("tolist",)) and bool(names_in(value.func.value) & made)  # type: ignore[attr-defined]
                name = name_of(target)
                if is_list and name is not None and is_only_index(loop, name):
                    replace_value(statement, value, value.func.value)  # type: ignore[attr-defined]  # a method's call
                    self.has_changed = True

    def _drop_guards(self, loop: ast.For) -> None:
        """if token.numel() == 0: continue"""
        made = {name for statement in loop.body for name in assigned_names(statement)}
        body: list[ast.stmt] = []
        for statement in loop.body:
            guard = emptiness_guard(statement)
            if guard is None or guard[0] not in made:
                body.append(statement)
                continue
            name, inner = guard
            mark = ast.Assign([ast.Name(name, ast.Store())], helper_call("guarded", [ast.Name(name, ast.Load())]))
            body.append(ast.copy_location(mark, statement))
            body.extend(inner)
            self.has_changed = True
        loop.body = body


class _IndexRewriter(ast.NodeTransformer):
    """Uses of a loop variable that was a tensor of one element, [1], and is now a number."""

    def __init__(self, loop: ast.For, mask: ast.expr, own: str) -> None:
        assert isinstance(loop.target, ast.Name)
        self._mask = ast.dump(mask)
        self._own = own
        self._name = loop.target.id
        self._others: set[str] = set()
        self._loop = loop
        self._is_row = True
        self._bases: dict[str, ast.expr] = {}
        self._is_conditional = False

    def statements(self) -> list[ast.stmt]:
        own = {name for statement in self._loop.body for name in assigned_names(statement)}
        body: list[ast.stmt] = []
        for statement in self._loop.body:
            name = unwrapped_name(statement, self._name)
            if name == self._name:
                self._is_row = False
            elif name is not None:
                self._others.add(name)
                body.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], loaded(self._name)), statement))
            else:
                body.append(self.visit(statement))
        bases = [base for base in self._bases.values() if not own & names_in(base)]
        if bases:
            test = ast.UnaryOp(ast.Not(), helper_call("exists", [ast.Name(self._name, ast.Load()), *bases]))
            body.insert(0, ast.copy_location(ast.If(test, [ast.Continue()], []), self._loop))
        return body

    def visit_If(self, node: ast.If) -> Any:
        return self._visit_conditional(node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        return self._visit_conditional(node)

    def _visit_conditional(self, node: ast.AST) -> ast.AST:
        """What a branch reads need not exist for every expert: experts without weights may take the other."""
        before, self._is_conditional = self._is_conditional, True
        self.generic_visit(node)
        self._is_conditional = before
        return node

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
        if self._own in names_in(node.value) and not self._is_conditional:
            self._bases.setdefault(ast.dump(node.value), node.value)
        is_mask = ast.dump(node.value) == self._mask
        is_row = self._is_row and is_name(node.slice, self._name)
        entry = helper_call("take", [node.value, node.slice]) if is_row else node
        return ast.copy_location(helper_call("guarded", [entry]) if is_mask else entry, node)

    def _is_expert(self, node: ast.AST) -> bool:
        return name_of(node) in {self._name, *self._others}


def _hoisted_counts(loop: ast.For) -> ast.Assign | None:
    """for e, num in enumerate(counts.tolist()): the list is given a name, and its assignment returned."""
    call = loop.iter
    is_pair = isinstance(call, ast.Call) and is_name(call.func, "enumerate") and len(call.args) == 1
    if not is_pair or not isinstance(call, ast.Call) or not is_method(call.args[0], ("tolist", "numpy")):
        return None
    name = f"{PREFIX}counts_{loop.lineno}"
    assignment = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], call.args[0]), loop)
    call.args[0] = loaded(name)
    return assignment


class _UniqueRewriter(ast.NodeTransformer):
    """Marks index == e, and takes e.item() for e."""

    def __init__(self, index: ast.expr, expert: str) -> None:
        self._index = index
        self._expert = expert

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        is_number = is_method(node, ("item",)) and is_name(node.func.value, self._expert)  # type: ignore[attr-defined]
        is_int = is_name(node.func, "int") and len(node.args) == 1 and is_name(node.args[0], self._expert)
        return loaded(self._expert) if is_number or is_int else node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        is_mask = is_equality(node, self._index, self._expert)
        return ast.copy_location(helper_call("guarded", [node]), node) if is_mask else node


def _other_names(loop: ast.For) -> set[str]:
    assert isinstance(loop.target, ast.Name)
    names = {unwrapped_name(statement, loop.target.id) for statement in loop.body}
    return {name for name in names if name is not None}
