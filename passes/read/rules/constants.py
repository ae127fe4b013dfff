"""Constant tensors among rows: they enter the expert function as numbers, where that means the same."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from memfine_fx.errors import Reason
from memfine_fx.passes.dataflow import same_size
from memfine_fx.passes.read.normal_form import Call
from memfine_fx.passes.read.reader import Reader
from memfine_fx.passes.read.values import Fill, Taken

__all__ = ["check_fills", "number_of"]

aten = torch.ops.aten


def check_fills(values: Sequence[Any], tensors: Sequence[Any], call: Call) -> None:
    """Constant tensors become numbers: refuse those that make rows wider, or of another dtype, than numbers would."""
    pairs = [(value, tensor) for value, tensor in zip(values, tensors, strict=True) if isinstance(tensor, torch.Tensor)]
    rows = [tensor for value, tensor in pairs if not isinstance(value, Fill)]
    if not rows or len(rows) == len(pairs):
        return
    dtypes = {tensor.dtype for _, tensor in pairs if tensor.ndim} | {tensor.dtype for tensor in rows}
    is_as_wide = all(
        any(same_size(size, tensor.shape[dim]) for tensor in rows if -dim <= tensor.ndim)
        for dim, size in ((dim, call.out.shape[dim]) for dim in range(-call.ndim, 0))
    )
    if not is_as_wide or _promoted(dtypes) is not _promoted({tensor.dtype for tensor in rows}):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "a constant tensor makes rows wider, or of another dtype")


def _promoted(dtypes: set[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def number_of(reader: Reader, value: Any, call: Call) -> Any:
    """An argument that is no row data, as it goes into the expert function."""
    if isinstance(value, torch.SymInt):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, f"a symbolic number {value} enters row data")
    if isinstance(value, Taken):
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "what the output holds enters row data")
    if not isinstance(value, Fill):
        return value
    if value.value is None:
        raise call.refused(Reason.ROWS_NOT_FOLLOWED, "an uninitialised tensor used as row data")
    if call.target is aten.where.self:  # it takes no number in the place of a tensor
        return reader.emit(aten.scalar_tensor.default, value.value, dtype=call.out.dtype, device=call.out.device)
    return value.value
