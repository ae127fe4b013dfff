"""Functions that rewritten loops call, under names that no model uses.

They are traced by Dynamo. `by_hand` lets them run eagerly, as a graph of them would: a body that was traced although
its condition would have skipped it is run, and names keep what they were.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from memfine_fx.compat.dynamo import last_failure
from memfine_fx.compat.effects import (
    PythonState,
    compile_time_calls,
    graph_being_traced,
    has_caller,
    is_same_value,
    line_being_traced,
    local_value,
    module_being_traced,
)
from memfine_fx.errors import GuardRefused, LeftoverShapes
from memfine_fx.passes.read.marker import (
    COMPARE,
    IF_RUN,
    all_ids,
    collected,
    count_rows,
    covered,
    enter_number,
    enter_tensor,
    if_run,
    leave_body,
    put_rows,
    same_number,
)

__all__ = ["NAMES", "PREFIX", "by_hand"]

PREFIX = "_memfine_"
NAMES = (
    "every_expert", "every_index", "part", "put", "take", "exists", "count", "body", "written", "collect", "store",
    "merged", "leave", "contains",
)  # fmt: skip
_OWN_FRAME, _CALLER = 0, 1
_traced: set[str] = set()
"""Places of the conditions that a trace has left open."""
_states: weakref.WeakKeyDictionary[Any, list[PythonState]] = weakref.WeakKeyDictionary()
"""Of each trace, the state at the beginning of the bodies that are being traced, innermost last."""
_thread = threading.local()
at_compile_time: Any = None
"""What calls a function while Dynamo traces, see `get_ready`."""


def get_ready() -> None:
    """Get what the helpers call while Dynamo traces: importing it would load Dynamo wherever memfine_fx is imported."""
    global at_compile_time
    at_compile_time = compile_time_calls()


class Body(NamedTuple):
    """A guarded body.

    Args:
        is_run: whether it is run now.
        where: its place, "file:line", or "" where Python decides on its condition.
        would_be_skipped: whether its condition holds that skips it; only known when it runs by hand.
    """

    is_run: bool
    where: str
    would_be_skipped: bool = False


@contextlib.contextmanager
def by_hand() -> Iterator[None]:
    """Inside, rewritten methods may run eagerly."""
    _thread.is_by_hand = True
    try:
        yield
    finally:
        _thread.is_by_hand = False


def every_expert(hits: torch.Tensor) -> Any:
    """Return 0 .. E-1 in place of the places where `hits` [E] holds."""
    return range(hits.shape[0])


def every_index(experts: Any, ids: torch.Tensor, where: str) -> Any:
    """Return 0 .. E-1 of a list or a table of experts, in place of the ids that name them."""
    num_experts = experts.shape[0] if isinstance(experts, torch.Tensor) else len(experts)
    if torch.compiler.is_compiling():
        all_ids(ids, num_experts, where)
    return range(num_experts)


def part(rows: torch.Tensor, counts: list[int], expert: int, where: str) -> torch.Tensor:
    """Return the rows of one expert, where they stand in the order of `counts`."""
    if torch.compiler.is_compiling():
        covered(rows, counts, where)
    return torch.split(rows, counts)[expert]


def put(out: torch.Tensor, counts: list[int], expert: int, where: str, rows: torch.Tensor) -> torch.Tensor:
    """Return `out` with the rows of one expert written where they stand in the order of `counts`."""
    if torch.compiler.is_compiling():
        covered(out, counts, where)
    return put_rows(out, rows, counts, expert)  # type: ignore[no-any-return]  # custom_op is untyped


def take(values: Any, expert: int) -> Any:
    """Return values[i] for a tensor i of one element: a tensor keeps the dimension, a list gives its item."""
    return values[expert : expert + 1] if isinstance(values, torch.Tensor) else values[expert]


def exists(expert: int, *values: Any) -> bool:
    """Return whether every one of `values` has an entry for this expert."""
    return all(expert < (value.shape[0] if isinstance(value, torch.Tensor) else len(value)) for value in values)


def count(ids: torch.Tensor, weights: None = None, minlength: int = 0) -> torch.Tensor:
    """Return `torch.bincount` of expert ids, with a result of known size."""
    return count_rows(ids, minlength)  # type: ignore[no-any-return]  # custom_op is untyped


# Guarded bodies, see `guards`.


def body(measure: Any, name: str, number: int, skips_if: bool, where: str) -> Body:
    """Return whether a body is run: as it is where Python decides on its condition, else yes, with a mark in the graph.

    Args:
        measure, name, number: the condition; "true" compares with nothing.
        skips_if: whether the condition skips the body where it holds, or else runs it.
        where: its place.
    """
    if not torch.compiler.is_compiling():
        return _body_by_hand(measure, name, number, skips_if, where)
    at_compile_time(_check_inlined)
    if isinstance(measure, torch.Tensor):
        enter_tensor(measure, "!=" if name == "true" else name, number, skips_if, where)
    elif isinstance(measure, (int, float)):
        from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

        condition = _holds(measure, name, number)
        least, most = guard_or_false(condition), guard_or_true(condition)
        if least == most:
            return Body(least != skips_if, "")
        enter_number(measure, "!=" if name == "true" else name, number, skips_if, where)
    else:
        return Body(bool(_holds(measure, name, number)) != skips_if, "")
    at_compile_time(_enter)
    return Body(True, where)


def _holds(measure: Any, name: str, number: int) -> Any:
    if name == "true":
        return measure != 0 if isinstance(measure, (int, float)) else bool(measure)
    return COMPARE[name](measure, number)


def _body_by_hand(measure: Any, name: str, number: int, skips_if: bool, where: str) -> Body:
    _check_by_hand()
    would_be_skipped = bool(_holds(measure, name, number)) == skips_if
    return Body(True, where, would_be_skipped) if where in _traced else Body(not would_be_skipped, "")


def _check_by_hand() -> None:
    """Refuse to run eagerly: a graph break would run rewritten code as if it were the user's."""
    if not getattr(_thread, "is_by_hand", False):
        raise LeftoverShapes("a loop that was rewritten is not captured as a whole")


def contains(values: Any, item: Any) -> Any:
    """Return whether `item in values`: of a tensor as a tensor, which a graph can hold."""
    return (values == item).any() if isinstance(values, torch.Tensor) else item in values


def written(value: Any, body: Body) -> Any:
    """Return what a body writes into, or calls a method of: a tensor, or a module of functions.

    Raises:
        GuardRefused: it is another object, which would change for an expert without rows too.
    """
    if body.where and not isinstance(value, (torch.Tensor, types.ModuleType)):
        at_compile_time(_refuse_object)
    return value


def collect(parts: list[torch.Tensor], rows: torch.Tensor, body: Body) -> None:
    """Append an expert's rows to a list that is put together behind the loop; none, where it has none."""
    parts.append(rows)
    if body.where and torch.compiler.is_compiling():
        collected(rows, body.where)
        at_compile_time(_let_grow)


def store(target: Any, index: Any, value: Any, body: Body) -> None:
    """Write an item; the entry of one expert keeps what it was where the body would have been skipped."""
    if isinstance(index, int) and isinstance(target, torch.Tensor):
        before = target[index]
        target[index] = merged(
            before, value if isinstance(value, torch.Tensor) else torch.zeros_like(before) + value, body
        )
    else:
        target[index] = value


def merged(old: Any, new: Any, body: Body) -> Any:
    """Return the new value of a name, or its old one where the body would have been skipped.

    Raises:
        GuardRefused: they differ, and are no tensors.
    """
    if not body.where:
        return new
    are_tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    if not torch.compiler.is_compiling():
        return old if are_tensors and body.would_be_skipped else new
    if are_tensors:
        return if_run(old, new, body.where)
    if type(old) is int and type(new) is int:
        same_number(old, new, body.where)
    else:
        at_compile_time(_check_same)
    return new


def leave(body: Body) -> None:
    """Mark the end of a body.

    Raises:
        GuardRefused: the body changed a Python object, or drew a number from Python's generator.
    """
    if body.where and torch.compiler.is_compiling():
        leave_body(body.where)
        at_compile_time(_leave)


# What runs while Dynamo traces, with the names of the helper that asks.


def _check_inlined(context: Any) -> None:
    """A frame of its own is compiled where a graph break made the loop around it run eagerly."""
    if not has_caller(context):
        where = local_value(context, "where").as_python_constant()
        place = last_failure(where.rpartition(":")[0])
        at = f" ({place})" if place else ""
        reason = f"a loop is not captured as a whole: TORCH_LOGS=graph_breaks shows what breaks it{at}"
        raise GuardRefused(reason, where, "")


def _enter(context: Any) -> None:
    _traced.add(local_value(context, "where").as_python_constant())
    _states.setdefault(graph_being_traced(context), []).append(PythonState.of(context, _CALLER))


def _leave(context: Any) -> None:
    before = _states[graph_being_traced(context)].pop()
    if PythonState.of(context, _CALLER).has_changed(before, _is_chosen):
        raise _unproved(context, "an attribute, a list or another Python object changes, or a random number is drawn")


def _is_chosen(variable: Any) -> bool:
    """Whether a value is a name's old or new one, which the graph chooses."""
    node = getattr(getattr(variable, "proxy", None), "node", None)
    return getattr(node, "target", None) is IF_RUN


def _let_grow(context: Any) -> None:
    for state in _states[graph_being_traced(context)]:
        state.let_grow(local_value(context, "parts"))


def _refuse_object(context: Any) -> None:
    raise _unproved(context, "something that is no tensor is written to, or called for what it does")


def _check_same(context: Any) -> None:
    if not is_same_value(local_value(context, "old"), local_value(context, "new")):
        raise _unproved(context, "a value that is no tensor, and that is read again later, changes")


def _unproved(context: Any, what: str) -> GuardRefused:
    where = local_value(context, "body").as_python_constant()[1]
    place = f" ({line_being_traced(context, _CALLER)})"
    return GuardRefused(f"{what}, in a body that is skipped{place}", where, module_being_traced(context))
