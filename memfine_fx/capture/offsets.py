"""Loops that cut rows in expert order with running Python offsets, rewritten to cut them with one split.

    start = 0
    for e, num in enumerate(counts):          for e, num in enumerate(counts):
        end = start + num                         rows = part(x, counts, e)      # torch.split(x, counts)[e]
        if num == 0:                      ->      ...
            continue
        rows = x[start:end]
        ...
        start = end

The same for ends that are known beforehand, as numbers: `ends = counts.cumsum(0)` and

    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if start == end:
            continue
        rows = x[start:end]

or `end = ends[e]` at the loop's head and `start = end` at its tail. Rows may be written at the same places,

        out[start:end] = rows                     out = put(out, counts, e, rows)

All cut the same rows, whatever the counts are; that the counts are the experts' is proved when the loop is read.
Offsets that are used for anything else than such slices leave a loop as it was written.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from memfine_fx.capture.helpers import PREFIX
from memfine_fx.capture.syntax import is_name, name_of

__all__ = ["use_splits"]


@dataclass(frozen=True)
class _Offsets:
    """Names of a loop: its expert, the counts, the count of this expert, where its rows start, and end (or None)."""

    expert: str
    counts: str
    count: str
    start: str
    end: str | None


def use_splits(function: ast.FunctionDef, loop: ast.For) -> bool:
    """Rewrite one loop in place; whether it was one of these."""
    written = loop.body
    loop.body = _unguarded(loop.body)
    if _cut_by_counts(function, loop):
        return True
    loop.body = written
    return False


def _cut_by_counts(function: ast.FunctionDef, loop: ast.For) -> bool:
    ends = _ends_of(function, loop) or _ends_at_head(function, loop)
    offsets = _offsets_of(function, loop) if ends is None else ends[0]
    if offsets is None:
        return False
    cutter = _Cutter(offsets)
    body = [cutter.visit(copy.deepcopy(one)) for one in loop.body if not _is_bookkeeping(one, offsets)]
    left = [node for one in body for node in ast.walk(one)]
    leaves_early = any(isinstance(node, (ast.Continue, ast.Break)) for node in left)
    is_read = any(name_of(node) in (offsets.start, offsets.end) for node in left if isinstance(node, ast.Name))
    if not cutter.num_cuts or is_read or leaves_early:
        return False
    loop.body = body
    if ends is not None:
        _take_counts(ends[1])
    for node in ast.walk(function):
        is_counts = isinstance(node, ast.Assign) and is_name(node.targets[0], offsets.counts)
        if is_counts and isinstance(node, ast.Assign) and _method(node.value) == "numpy":
            assert isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
            node.value.func.attr = "tolist"
    return True


def _offsets_of(function: ast.FunctionDef, loop: ast.For) -> _Offsets | None:
    named = _counts_of(loop)
    if named is None:
        return None
    expert, counts, count = named
    stores = [node for node in ast.walk(loop) if isinstance(node, (ast.Assign, ast.AugAssign))]
    for one in stores:
        start = end = None
        if isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Add) and _says(one.value, count):
            start = name_of(one.target)
        elif isinstance(one, ast.Assign) and _is_sum(one.value, count):
            end, start = name_of(one.targets[0]), name_of(one.value.left)  # type: ignore[attr-defined]  # a sum
            if not any(_moves(other, start, end) for other in stores):
                continue
        if start is not None and _starts_at_zero(function, loop, start) and _num_stores(stores, start, end):
            return _Offsets(expert, counts, count, start, end)
    return None


def _ends_of(function: ast.FunctionDef, loop: ast.For) -> tuple[_Offsets, ast.Assign] | None:
    """Offsets and the assignment of the ends, of a loop over a running sum that nothing else reads."""
    is_pair = isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2
    if not is_pair or not isinstance(loop.target, ast.Tuple) or not isinstance(loop.iter, ast.Call):
        return None
    expert, end = map(name_of, loop.target.elts)
    ends = name_of(loop.iter.args[0]) if is_name(loop.iter.func, "enumerate") and len(loop.iter.args) == 1 else None
    if expert is None or end is None or ends is None:
        return None
    before = f"0 if {expert} == 0 else {ends}[{expert} - 1]"
    starts = [one for one in loop.body if isinstance(one, ast.Assign) and _says(one.value, before)]
    uses = [node for node in ast.walk(function) if is_name(node, ends)]
    sums = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and _is_running_sum(node, ends)]
    start = name_of(starts[0].targets[0]) if len(starts) == 1 else None
    if start is None or len(sums) != 1 or len(uses) != 3:
        return None
    return _Offsets(expert, ends, end, start, end), sums[0]


def _ends_at_head(function: ast.FunctionDef, loop: ast.For) -> tuple[_Offsets, ast.Assign] | None:
    """The same of `end = int(ends[e])` ... `start = end`, where start is zero before the loop."""
    expert = _expert_of(loop)
    stores = [node for node in ast.walk(loop) if isinstance(node, (ast.Assign, ast.AugAssign))]
    for one in stores:
        end = name_of(one.targets[0]) if isinstance(one, ast.Assign) else None
        entry = _number_of(one.value)
        if end is None or expert is None or not isinstance(entry, ast.Subscript) or not is_name(entry.slice, expert):
            continue
        ends = name_of(entry.value)
        sums = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and _is_running_sum(node, ends)]
        moves = [node for node in stores if isinstance(node, ast.Assign) and is_name(node.value, end)]
        start = name_of(moves[0].targets[0]) if len(moves) == 1 else None
        num_uses = sum(is_name(node, ends) for node in ast.walk(function))
        is_alone = ends is not None and len(sums) == 1 and num_uses == 2
        if is_alone and start and _starts_at_zero(function, loop, start) and _num_stores(stores, start, end):
            assert ends is not None
            return _Offsets(expert, ends, end, start, end), sums[0]
    return None


def _number_of(value: ast.expr) -> ast.expr:
    """X of int(X) and X.item()."""
    while is_name(getattr(value, "func", None), "int") and isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    return value.func.value if _method(value) == "item" else value  # type: ignore[attr-defined]  # a method's call


def _expert_of(loop: ast.For) -> str | None:
    """The loop's counter: e of `for e in range(...)` and of `for e, ... in enumerate(...)`."""
    function = loop.iter.func if isinstance(loop.iter, ast.Call) else None
    if is_name(function, "range"):
        return name_of(loop.target)
    is_pair = is_name(function, "enumerate") and isinstance(loop.target, ast.Tuple)
    return name_of(loop.target.elts[0]) if is_pair and isinstance(loop.target, ast.Tuple) else None


def _unguarded(body: list[ast.stmt]) -> list[ast.stmt]:
    """if end > start: rows ... as if end == start: continue; rows ..., where only `start = end` follows."""
    for place, one in enumerate(body):
        test = one.test if isinstance(one, ast.If) and not one.orelse else None
        if not isinstance(one, ast.If) or not isinstance(test, ast.Compare) or len(test.ops) != 1:
            continue
        names = {name_of(test.left), name_of(test.comparators[0])}
        rest = body[place + 1 :]
        moved = {name_of(rest[0].targets[0]), name_of(rest[0].value)} if _is_last_assignment(rest) else set()
        if isinstance(test.ops[0], (ast.Gt, ast.Lt, ast.NotEq)) and None not in names and names == moved:
            skip = ast.If(ast.Compare(test.left, [ast.Eq()], test.comparators), [ast.Continue()], [])
            return [*body[:place], ast.copy_location(skip, one), *one.body, *rest]
    return body


def _is_last_assignment(statements: list[ast.stmt]) -> TypeGuard[list[ast.Assign]]:
    return len(statements) == 1 and isinstance(statements[0], ast.Assign)


def _is_running_sum(assignment: ast.Assign, ends: str | None) -> bool:
    """ends = X.cumsum(0), with moves to the host before or after."""
    return is_name(assignment.targets[0], ends) and _running_sum(assignment.value) is not None


def _running_sum(value: ast.expr) -> ast.Call | None:
    """The call X.cumsum(0) or X.cumsum(dim=0) behind moves to the host."""
    while _method(value) in ("cpu", "numpy", "tolist"):
        value = value.func.value  # type: ignore[attr-defined]  # a method's call
    if _method(value) != "cumsum" or not isinstance(value, ast.Call):
        return None
    dims = [*value.args, *(keyword.value for keyword in value.keywords)]
    is_first = all(isinstance(one, ast.Constant) and one.value == 0 for one in dims)
    return value if is_first and len(dims) <= 1 else None


def _take_counts(assignment: ast.Assign) -> None:
    """ends = X.cumsum(0) becomes a list of X, the counts."""
    total = _running_sum(assignment.value)
    assert total is not None and isinstance(total.func, ast.Attribute)
    counts = total.func.value
    while _method(counts) in ("cpu", "numpy"):
        counts = counts.func.value  # type: ignore[attr-defined]  # a method's call
    assignment.value = ast.copy_location(
        ast.Call(ast.Attribute(counts, "tolist", ast.Load()), [], []), assignment.value
    )


def _counts_of(loop: ast.For) -> tuple[str, str, str] | None:
    """(e, counts, the text of counts[e]) of `for e, num in enumerate(counts)` or of a loop that reads counts[e]."""
    is_pair = isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2
    if is_pair and isinstance(loop.target, ast.Tuple) and isinstance(loop.iter, ast.Call):
        expert, count = map(name_of, loop.target.elts)
        source = loop.iter.args[0] if is_name(loop.iter.func, "enumerate") and len(loop.iter.args) == 1 else None
        if _method(source) == "tolist" or not isinstance(source, ast.Name):
            source = None
        if expert is not None and count is not None and source is not None:
            return expert, source.id, count
    expert = name_of(loop.target) or (name_of(loop.target.elts[0]) if isinstance(loop.target, ast.Tuple) else None)
    for node in ast.walk(loop):
        if not isinstance(node, (ast.AugAssign, ast.Assign)) or not isinstance(node.value, ast.Subscript):
            continue
        counts = name_of(node.value.value)
        name = name_of(node.targets[0]) if isinstance(node, ast.Assign) else ast.unparse(node.value)
        if None not in (expert, counts, name) and is_name(node.value.slice, expert):
            return expert, counts, name  # type: ignore[return-value]  # none of them is None
    return None


class _Cutter(ast.NodeTransformer):
    """x[start:end] -> part(x, counts, e), x[start:end] = rows -> x = put(x, counts, e, rows)"""

    def __init__(self, offsets: _Offsets) -> None:
        self._offsets = offsets
        self.num_cuts = 0

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        return self._call("part", node, []) if isinstance(node.ctx, ast.Load) and self._is_cut(node) else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        target = node.targets[0]
        if len(node.targets) != 1 or not isinstance(target, ast.Subscript) or not self._is_cut(target):
            return node
        name = name_of(target.value)
        if name is None:
            return node
        target.value = ast.Name(name, ast.Load())
        return ast.copy_location(
            ast.Assign([ast.Name(name, ast.Store())], self._call("put", target, [node.value])), node
        )

    def _is_cut(self, node: ast.Subscript) -> bool:
        cut = node.slice
        if not isinstance(cut, ast.Slice) or cut.step is not None:
            return False
        ends = is_name(cut.upper, self._offsets.end) or (
            _is_sum(cut.upper, self._offsets.count) and is_name(cut.upper.left, self._offsets.start)  # type: ignore[union-attr]
        )
        return is_name(cut.lower, self._offsets.start) and ends

    def _call(self, helper: str, node: ast.Subscript, others: list[ast.expr]) -> ast.Call:
        self.num_cuts += 1
        names = [ast.Name(name, ast.Load()) for name in (self._offsets.counts, self._offsets.expert)]
        call = ast.Call(ast.Name(PREFIX + helper, ast.Load()), [node.value, *names, *others], [])
        return ast.copy_location(call, node)


def _is_bookkeeping(statement: ast.stmt, offsets: _Offsets) -> bool:
    if isinstance(statement, ast.AugAssign):
        return is_name(statement.target, offsets.start)
    if isinstance(statement, ast.Assign):
        name = name_of(statement.targets[0])
        return name is not None and name in (offsets.start, offsets.end)
    is_guard = isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.test, ast.Compare)
    if not is_guard or not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
        return False
    skips = len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue)
    test = statement.test
    if offsets.end == offsets.count and isinstance(test.ops[0], ast.Eq):  # ends that are known beforehand
        return skips and {name_of(test.left), name_of(test.comparators[0])} == {offsets.start, offsets.end}
    is_zero = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value == 0
    return skips and is_zero and isinstance(test.ops[0], ast.Eq) and _says(test.left, offsets.count)


def _moves(statement: ast.stmt, start: str | None, end: str | None) -> bool:
    """start = end"""
    return isinstance(statement, ast.Assign) and is_name(statement.targets[0], start) and is_name(statement.value, end)


def _num_stores(stores: Sequence[ast.stmt], start: str, end: str | None) -> bool:
    """Whether the loop stores each offset once."""
    targets = [one.target if isinstance(one, ast.AugAssign) else one.targets[0] for one in stores]  # type: ignore[attr-defined]
    names = [name_of(target) for target in targets]
    return names.count(start) == 1 and (end is None or names.count(end) == 1)


def _starts_at_zero(function: ast.FunctionDef, loop: ast.For, start: str) -> bool:
    """Whether the one assignment of `start` outside of the loop is to zero."""
    inside = set(ast.walk(loop))
    outside = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == start and isinstance(node.ctx, ast.Store) and node not in inside
    ]
    values = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and node not in inside and is_name(node.targets[0], start)
    ]
    return len(outside) == len(values) == 1 and isinstance(values[0], ast.Constant) and values[0].value == 0


def _is_sum(value: ast.AST | None, count: str) -> bool:
    is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
    return is_sum and isinstance(value, ast.BinOp) and isinstance(value.left, ast.Name) and _says(value.right, count)


def _says(value: ast.AST, text: str) -> bool:
    return ast.unparse(value) == text


def _method(value: ast.AST | None) -> str | None:
    return value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else None
