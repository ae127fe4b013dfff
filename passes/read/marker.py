"""Operations that mark what a rewritten expert loop assumes, so that the assumption can be proved in the graph.

They stand in for a model's own code while a loop is captured (see `memfine_fx.capture.source`). Two compute, exactly or
with an error: `count_rows` counts rows per expert with a result of known size, `put_rows` writes one expert's rows at
their places in expert order. The others are marks, which `guards` takes out of a graph before anything else reads it:

    enter_tensor, enter_number   from here on a body stands that the model skips under a condition
    leave_body                   here it ends
    if_run                       a name's value after it: what the body made, or what it was before where it is skipped
    same_number                  two numbers that are the same where the body is skipped
    collected                    rows that are appended to a list and concatenated later: none where the body is skipped
    all_ids                      ids of experts of which each has to exist
    covered                      rows that are cut by counts, which have to be as many
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "ALL_IDS",
    "COLLECTED",
    "COMPARE",
    "COUNT_ROWS",
    "COVERED",
    "ENTER_NUMBER",
    "ENTER_TENSOR",
    "IF_RUN",
    "LEAVE_BODY",
    "MARKS",
    "PUT_ROWS",
    "SAME_NUMBER",
    "all_ids",
    "collected",
    "count_rows",
    "covered",
    "enter_number",
    "enter_tensor",
    "if_run",
    "leave_body",
    "put_rows",
    "same_number",
]

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
"""Operators of the conditions in marks, by name."""


@torch.library.custom_op("memfine::count_rows", mutates_args=())
def count_rows(expert_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E]: how often each expert is named.

    Args:
        expert_index: [N] ints in [0, E).
        num_experts: E.

    Raises:
        IndexError: an id is E or more, of which `torch.bincount` would make a longer result.
    """
    counts = torch.bincount(expert_index, minlength=num_experts)
    if counts.shape[0] > num_experts:
        raise IndexError(f"expert ids outside [0, {num_experts}) are counted")
    return counts


@count_rows.register_fake
def _(expert_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    return expert_index.new_empty((num_experts,), dtype=torch.int64)


@torch.library.custom_op("memfine::put_rows", mutates_args=())
def put_rows(out: torch.Tensor, rows: torch.Tensor, counts: list[int], expert: int) -> torch.Tensor:
    """A copy of `out` in which one expert's rows are overwritten.

    Args:
        out: [N,...] in expert order.
        rows: [counts[expert],...].
        counts: rows of each expert.
        expert: whose rows these are.
    """
    result = out.clone()
    torch.split(result, counts)[expert].copy_(rows)
    return result


@put_rows.register_fake
def _(out: torch.Tensor, rows: torch.Tensor, counts: list[int], expert: int) -> torch.Tensor:
    return torch.empty_like(out)


def _note_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, ctx.counts, ctx.expert = inputs


def _split_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    of_out = grad.clone()
    torch.split(of_out, ctx.counts)[ctx.expert].zero_()
    return of_out, torch.split(grad, ctx.counts)[ctx.expert].clone(), None, None


put_rows.register_autograd(_split_gradient, setup_context=_note_rows)


def _mark(name: str, schema: str, *, gives: bool = False) -> Any:
    """Define a mark: an operation that stands in graphs alone."""

    def run(*_: Any) -> None:
        raise AssertionError(f"memfine::{name} is taken out of a graph before the graph runs")

    mark = torch.library.custom_op(f"memfine::{name}", run, mutates_args=(), schema=schema)
    mark.register_fake(lambda *values: torch.empty_like(values[1]) if gives else None)
    if gives:
        mark.register_autograd(lambda ctx, gradient: (None, gradient, None))
    return mark


enter_tensor = _mark("enter_tensor", "(Tensor measure, str operator, SymInt number, bool skips_if, str where) -> ()")
enter_number = _mark("enter_number", "(SymInt measure, str operator, SymInt number, bool skips_if, str where) -> ()")
leave_body = _mark("leave_body", "(str where) -> ()")
if_run = _mark("if_run", "(Tensor old, Tensor new, str where) -> Tensor", gives=True)
same_number = _mark("same_number", "(SymInt old, SymInt new, str where) -> ()")
collected = _mark("collected", "(Tensor rows, str where) -> ()")
covered = _mark("covered", "(Tensor rows, SymInt[] counts, str where) -> ()")
all_ids = _mark("all_ids", "(Tensor ids, SymInt num_experts, str where) -> ()")

COUNT_ROWS = torch.ops.memfine.count_rows.default
PUT_ROWS = torch.ops.memfine.put_rows.default
ENTER_TENSOR = torch.ops.memfine.enter_tensor.default
ENTER_NUMBER = torch.ops.memfine.enter_number.default
LEAVE_BODY = torch.ops.memfine.leave_body.default
IF_RUN = torch.ops.memfine.if_run.default
SAME_NUMBER = torch.ops.memfine.same_number.default
ALL_IDS = torch.ops.memfine.all_ids.default
COLLECTED = torch.ops.memfine.collected.default
COVERED = torch.ops.memfine.covered.default
MARKS = frozenset({ENTER_TENSOR, ENTER_NUMBER, LEAVE_BODY, IF_RUN, SAME_NUMBER, COLLECTED, ALL_IDS, COVERED})
