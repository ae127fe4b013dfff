"""What rewritten loops call, under names that no model uses."""

from __future__ import annotations

from typing import Any

import torch

from memfine_fx.passes.read.marker import count_rows, put_rows, rows_of

__all__ = ["NAMES", "PREFIX", "count", "every_expert", "every_index", "exists", "guarded", "part", "put", "take"]

PREFIX = "_memfine_"
NAMES = ("every_expert", "every_index", "part", "put", "take", "exists", "guarded", "count")


def every_expert(hits: torch.Tensor) -> Any:
    """0 .. E-1 in place of the places where `hits` [E] holds."""
    return range(hits.shape[0])


def every_index(experts: Any) -> Any:
    """0 .. E-1 of a list or a table of experts."""
    return range(experts.shape[0] if isinstance(experts, torch.Tensor) else len(experts))


def part(rows: torch.Tensor, counts: list[int], expert: int) -> torch.Tensor:
    """The rows of one expert, where they stand in the order of `counts`."""
    return rows_of(torch.split(rows, counts)[expert])  # type: ignore[no-any-return]  # custom_op is untyped


def put(out: torch.Tensor, counts: list[int], expert: int, rows: torch.Tensor) -> torch.Tensor:
    """`out` with the rows of one expert written where they stand in the order of `counts`."""
    return put_rows(out, rows, counts, expert)  # type: ignore[no-any-return]  # custom_op is untyped


def take(values: Any, expert: int) -> Any:
    """values[i] for a tensor i of one element: a tensor keeps the dimension, a list gives its item."""
    return values[expert : expert + 1] if isinstance(values, torch.Tensor) else values[expert]


def exists(expert: int, *values: Any) -> bool:
    """Whether every one of `values` has an entry for this expert."""
    return all(expert < (value.shape[0] if isinstance(value, torch.Tensor) else len(value)) for value in values)


def guarded(places: Any) -> Any:
    """Mark what an expert was skipped for; several places are marked one by one."""
    return tuple(map(rows_of, places)) if isinstance(places, tuple) else rows_of(places)


def count(ids: torch.Tensor, weights: None = None, minlength: int = 0) -> torch.Tensor:
    """`torch.bincount` of expert ids, with a result of known size."""
    return count_rows(ids, minlength)  # type: ignore[no-any-return]  # custom_op is untyped
