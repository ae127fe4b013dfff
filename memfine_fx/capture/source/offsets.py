"""Loops that cut rows in expert order with Python offsets, rewritten to cut them with one split.

Three ways to keep the offsets (`_running`, `_between_ends`, `_up_to_ends`) of what an expert reads and writes:

    rows = x[start:end]            ->         rows = part(x, counts, e)         # torch.split(x, counts)[e]
    out[start:end] = rows                     out = put(out, counts, e, rows)

All cut the same rows, whatever the counts are; that the counts are the experts' is proved when the loop is read.
Offsets that are used for anything else than such slices leave a loop as it was written.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass

from memfine_fx.capture.source.liveness import Liveness
from memfine_fx.capture.source.syntax import (
    helper_call,
    is_method,
    is_name,
    is_zero,
    loaded,
    name_of,
    stored,
    without_int,
    without_methods,
)

__all__ = ["use_splits"]


@dataclass(frozen=True)
class _Offsets:
    """Names of a loop.

    Args:
        expert: its counter.
        counts: rows of each expert; until they are rewritten, their running sum if `ends` is given.
        count: what this expert's count (or end) is called, or the text of its expression.
        start, end: where this expert's rows start, and end if that has a name.
        ends: the assignment of the running sum.
    """

    expert: str
    counts: str
    count: str
    start: str
    end: str | None
    ends: ast.Assign | None = None


def use_splits(function: ast.FunctionDef, loop: ast.For, file: str) -> bool:
    """Rewrite one loop in place; return whether it was one of these.

    Args:
        file: that the function stands in, for reports.
    """
    written, loop.body = loop.body, _unguarded(loop.body)
    live = Liveness(function).after(loop)
    offsets = _between_ends(function, loop) or _up_to_ends(function, loop) or _running(function, loop)
    body = None if offsets is None else _cut(loop.body, offsets, file)
    if offsets is None or body is None or live & {offsets.start, offsets.end}:
        loop.body = written
        return False
    loop.body = body
    if offsets.ends is not None:
        counts = without_methods(_summed(offsets.ends.value) or offsets.ends.value, ("cpu", "numpy"))
        tolist = ast.Call(ast.Attribute(counts, "tolist", ast.Load()), [], [])
        offsets.ends.value = ast.copy_location(tolist, offsets.ends.value)
    for node in ast.walk(function):
        match node:
            case ast.Assign([ast.Name(name), *_], ast.Call(ast.Attribute(attr="numpy") as method)) if (
                name == offsets.counts
            ):
                method.attr = "tolist"
    return True


def _cut(body: list[ast.stmt], offsets: _Offsets, file: str) -> list[ast.stmt] | None:
    """The body with parts in place of slices, None where offsets are left over."""
    cutter = _Cutter(offsets, file)
    result: list[ast.stmt] = []
    for statement in body:
        if _skips_empty_slice(statement, offsets):
            # Offsets do not move over an empty slice, so that what moves them needs no condition.
            count = ast.Subscript(loaded(offsets.counts), loaded(offsets.expert), ast.Load())
            test = ast.Compare(count, [ast.Eq()], [ast.Constant(0)])
            result.append(ast.fix_missing_locations(ast.copy_location(ast.If(test, [ast.Continue()], []), statement)))
        elif not _moves_offsets(statement, offsets):
            result.append(cutter.visit(copy.deepcopy(statement)))
            for node in ast.walk(result[-1]):
                if isinstance(node, (ast.Continue, ast.Break)) or name_of(node) in (offsets.start, offsets.end or ""):
                    return None
    return result if cutter.num_cuts else None


def _running(function: ast.FunctionDef, loop: ast.For) -> _Offsets | None:
    """start = 0 before a loop with `start += num`, or with `end = start + num` and `start = end`."""
    named = _counts_of(loop)
    if named is None:
        return None
    expert, counts, count = named
    stores = _stores(loop)
    end: str | None
    for store in stores:
        match store:
            case ast.AugAssign(ast.Name(start), ast.Add(), value) if ast.unparse(value) == count:
                end = None
            case ast.Assign([ast.Name(end), *_], ast.BinOp(ast.Name(start), ast.Add(), value)) if ast.unparse(
                value
            ) == count and any(_moves(other, start, end) for other in stores):
                pass
            case _:
                continue
        if _starts_at_zero(function, loop, start) and _are_stored_once(stores, start, end):
            return _Offsets(expert, counts, count, start, end)
    return None


def _between_ends(function: ast.FunctionDef, loop: ast.For) -> _Offsets | None:
    """for e, end in enumerate(ends) with `start = 0 if e == 0 else ends[e - 1]`, where ends = counts.cumsum(0)."""
    match loop:
        case ast.For(ast.Tuple([ast.Name(expert), ast.Name(end)]), ast.Call(ast.Name("enumerate"), [ast.Name(ends)])):
            before = f"0 if {expert} == 0 else {ends}[{expert} - 1]"
        case _:
            return None
    starts = [
        statement.targets[0]
        for statement in loop.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) == before
    ]
    start = name_of(starts[0]) if len(starts) == 1 else None
    total = _running_sum(function, ends, num_uses=3)
    return None if start is None or total is None else _Offsets(expert, ends, end, start, end, total)


def _up_to_ends(function: ast.FunctionDef, loop: ast.For) -> _Offsets | None:
    """`end = ends[e]` at the loop's head and `start = end` at its tail, where start is zero before the loop."""
    match loop:
        case ast.For(ast.Name(expert), ast.Call(ast.Name("range"))):
            pass
        case ast.For(ast.Tuple([ast.Name(expert), *_]), ast.Call(ast.Name("enumerate"))):
            pass
        case _:
            return None
    stores = _stores(loop)
    for store in stores:
        match store:
            case ast.Assign([ast.Name(end), *_], value):
                value = without_int(value)
            case _:
                continue
        match value.func.value if is_method(value, ("item",)) else value:  # type: ignore[attr-defined]  # a method's call
            case ast.Subscript(ast.Name(ends), ast.Name(index)) if index == expert:
                total = _running_sum(function, ends, num_uses=2)
            case _:
                continue
        moves = [other.targets[0] for other in stores if isinstance(other, ast.Assign) and is_name(other.value, end)]
        start = name_of(moves[0]) if len(moves) == 1 else None
        if total is None or start is None:
            continue
        if _starts_at_zero(function, loop, start) and _are_stored_once(stores, start, end):
            return _Offsets(expert, ends, end, start, end, total)
    return None


def _counts_of(loop: ast.For) -> tuple[str, str, str] | None:
    """(e, counts, the text of counts[e]) of `for e, num in enumerate(counts)` or of a loop that reads counts[e]."""
    match loop:
        case ast.For(
            ast.Tuple([ast.Name(expert), ast.Name(count)]), ast.Call(ast.Name("enumerate"), [ast.Name(counts)])
        ):
            return expert, counts, count
    match loop.target:
        case ast.Name(expert) | ast.Tuple([ast.Name(expert), *_]):
            pass
        case _:
            return None
    for node in ast.walk(loop):
        match node:
            case ast.Assign([ast.Name(count), *_], ast.Subscript(ast.Name(counts), ast.Name(index))):
                pass
            case ast.AugAssign(value=ast.Subscript(ast.Name(counts), ast.Name(index)) as entry):
                count = ast.unparse(entry)
            case _:
                continue
        if index == expert:
            return expert, counts, count
    return None


def _running_sum(function: ast.FunctionDef, name: str, *, num_uses: int) -> ast.Assign | None:
    """The one assignment `name = X.cumsum(0)`, where the function names it only so often."""
    if sum(is_name(node, name) for node in ast.walk(function)) != num_uses:
        return None
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and is_name(node.targets[0], name)]
    sums = [node for node in nodes if _summed(node.value) is not None]
    return sums[0] if len(sums) == 1 else None


def _summed(value: ast.expr) -> ast.expr | None:
    """X of X.cumsum(0) and X.cumsum(dim=0), behind moves to the host."""
    match without_methods(value, ("cpu", "numpy", "tolist")):
        case ast.Call(ast.Attribute(source, "cumsum"), arguments, keywords):
            dims = [*arguments, *(keyword.value for keyword in keywords)]
            return source if len(dims) <= 1 and all(map(is_zero, dims)) else None
    return None


def _unguarded(body: list[ast.stmt]) -> list[ast.stmt]:
    """if end > start: rows ... as if end == start: continue; rows ..., where only `start = end` follows."""
    for place, statement in enumerate(body):
        match statement, body[place + 1 :]:
            case (
                ast.If(ast.Compare(ast.Name(left), [ast.Gt() | ast.Lt() | ast.NotEq()], [ast.Name(right)]), inner, []),
                [ast.Assign([ast.Name(target), *_], ast.Name(value)) as last],
            ) if {left, right} == {target, value}:
                test = ast.Compare(loaded(left), [ast.Eq()], [loaded(right)])
                return [*body[:place], ast.copy_location(ast.If(test, [ast.Continue()], []), statement), *inner, last]
    return body


class _Cutter(ast.NodeTransformer):
    """x[start:end] -> part(x, counts, e), x[start:end] = rows -> x = put(x, counts, e, rows)"""

    def __init__(self, offsets: _Offsets, file: str) -> None:
        self._offsets, self._file = offsets, file
        self._ends = (offsets.end, f"{offsets.start} + {offsets.count}")
        self.num_cuts = 0

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        return self._call("part", node, []) if isinstance(node.ctx, ast.Load) and self._is_cut(node) else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        match node.targets:
            case [ast.Subscript(ast.Name(name)) as target] if self._is_cut(target):
                target.value = loaded(name)
                return ast.copy_location(ast.Assign([stored(name)], self._call("put", target, [node.value])), node)
        return node

    def _is_cut(self, node: ast.Subscript) -> bool:
        match node.slice:
            case ast.Slice(ast.Name(start), ast.expr() as upper, None):
                return start == self._offsets.start and ast.unparse(upper) in self._ends
        return False

    def _call(self, helper: str, node: ast.Subscript, others: list[ast.expr]) -> ast.Call:
        self.num_cuts += 1
        names = [loaded(name) for name in (self._offsets.counts, self._offsets.expert)]
        where = ast.Constant(f"{self._file}:{node.lineno}")
        return ast.copy_location(helper_call(helper, [node.value, *names, where, *others]), node)


def _moves_offsets(statement: ast.stmt, offsets: _Offsets) -> bool:
    """Whether a statement only moves the offsets."""
    match statement:
        case ast.AugAssign(ast.Name(name)):
            return name == offsets.start
        case ast.Assign([ast.Name(name), *_]):
            return name in (offsets.start, offsets.end)
    return False


def _skips_empty_slice(statement: ast.stmt, offsets: _Offsets) -> bool:
    """Whether a statement skips an expert whose slice is empty."""
    match statement:
        case ast.If(ast.Compare(left, [ast.Eq()], [right]), [ast.Continue()], []):
            if offsets.ends is not None:
                return {name_of(left), name_of(right)} == {offsets.start, offsets.end}
            return is_zero(right) and ast.unparse(left) == offsets.count
    return False


def _stores(loop: ast.For) -> list[ast.Assign | ast.AugAssign]:
    return [node for node in ast.walk(loop) if isinstance(node, (ast.Assign, ast.AugAssign))]


def _moves(statement: ast.stmt, start: str, end: str | None) -> bool:
    """Return whether a statement is `start = end`."""
    return isinstance(statement, ast.Assign) and is_name(statement.targets[0], start) and is_name(statement.value, end)


def _are_stored_once(stores: Sequence[ast.Assign | ast.AugAssign], start: str, end: str | None) -> bool:
    names = [name_of(store.target if isinstance(store, ast.AugAssign) else store.targets[0]) for store in stores]
    return names.count(start) == 1 and (end is None or names.count(end) == 1)


def _starts_at_zero(function: ast.FunctionDef, loop: ast.For, start: str) -> bool:
    """Whether the one assignment of `start` outside of the loop is to zero."""
    inside = set(ast.walk(loop))
    outside = [node for node in ast.walk(function) if node not in inside]
    stores = [node for node in outside if is_name(node, start) and isinstance(node.ctx, ast.Store)]  # type: ignore[attr-defined]
    values = [node.value for node in outside if isinstance(node, ast.Assign) and is_name(node.targets[0], start)]
    return len(stores) == len(values) == 1 and is_zero(values[0])
