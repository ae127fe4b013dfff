"""Lift: from one expert on its rows to a chunk's whole range of experts, by grouped matmuls.

Before:  rows [R,H] of one expert, params of that expert        mm(x, P)
After:   rows [R,H] of a range of experts, sorted by expert,    grouped_mm(x, P_range, ends)
         params [G,...] of the range, row -> group, group ends  P_range[group] where a row needs its own

The backward is the vjp of the lifted function; its weight gradients come per group. Used where one grouped
kernel beats a launch per expert (CUDA, bf16: `grouped_mm` takes nothing else under tracing).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.tracing import TensorSpec, TracedFunction, trace_rows
from memfine_fx.records import ExpertFunction

__all__ = ["can_lift", "lift_over_experts"]

aten = torch.ops.aten
_ALIGNMENT_BYTES = 16


def can_lift(expert_fn: ExpertFunction, specs: tuple[TensorSpec, ...]) -> bool:
    """Whether grouped matmuls can compute this function: all tables, all bf16, rows of matrices 16-byte aligned."""
    has_tables = all(kind == "expert" for kind in expert_fn.param_kinds)
    matrices = [spec for spec in specs if len(spec.shape) == 2 and not spec.per_row]
    sizes = [specs[0].shape[0], *(size for spec in matrices for size in spec.shape)]
    is_bf16 = all(spec.dtype is torch.bfloat16 for spec in (specs[0], *matrices))
    return has_tables and is_bf16 and all(size * 2 % _ALIGNMENT_BYTES == 0 for size in sizes)


def lift_over_experts(
    function: TracedFunction, specs: tuple[TensorSpec, ...], expert_fn: ExpertFunction
) -> tuple[TracedFunction, tuple[TensorSpec, ...]]:
    """The lifted function and its specs: rows, weight if any, params [G,...], group of each row, group ends.

    Raises:
        CannotChunk: an operation of the function has no lifted form.
    """
    num_lead = 2 if expert_fn.has_weight else 1
    device = specs[0].device
    params = [dataclasses.replace(spec, per_group=True) for spec in specs[num_lead:]]
    group = TensorSpec((), torch.int64, device, per_row=True)
    ends = TensorSpec((), torch.int32, device, per_group=True)
    lifted_specs = (*specs[:num_lead], *params, group, ends)
    lifted = _LiftedFunction(function.graph_module, num_lead)
    return trace_rows(lifted, lifted_specs), lifted_specs


class _LiftedFunction:
    """Runs the per-expert graph with tables in place of parameters."""

    def __init__(self, graph_module: fx.GraphModule, num_lead: int) -> None:
        self._graph_module = graph_module
        self._num_lead = num_lead

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        *values, group, ends = args
        interpreter = _LiftInterpreter(self._graph_module, self._num_lead, group, ends)
        result = interpreter.run(*values)
        return result[0] if isinstance(result, (tuple, list)) else result  # type: ignore[no-any-return]  # one tensor


class _Table:
    """A parameter of every expert of the range, and how the per-expert graph views it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _LiftInterpreter(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule, num_lead: int, group: torch.Tensor, ends: torch.Tensor) -> None:
        super().__init__(graph_module)
        self._num_lead = num_lead
        self._num_seen = 0
        self._group = group
        self._ends = ends

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().placeholder(target, args, kwargs)
        self._num_seen += 1
        return value if self._num_seen <= self._num_lead else _Table(value)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.mm.default and isinstance(args[1], _Table):
            return torch.nn.functional.grouped_mm(args[0], args[1].tensor, offs=self._ends)
        if args and isinstance(args[0], _Table):
            return self._view(target, args, kwargs)
        plain = [self._per_row(value) for value in args]
        if any(isinstance(leaf, _Table) for leaf in tree_leaves((plain, kwargs))):
            raise CannotChunk(Reason.NOT_LIFTED, f"{target} of several parameters cannot be lifted over experts")
        return super().call_function(target, tuple(plain), kwargs)

    def _per_row(self, value: Any) -> Any:
        """A table entry for each row, [R,...] in place of the per-expert [1,...]."""
        if not isinstance(value, _Table):
            return value
        if value.tensor.ndim < 2 or value.tensor.shape[1] != 1:
            raise CannotChunk(Reason.NOT_LIFTED, "a parameter without a broadcast row dimension cannot be lifted")
        return value.tensor.squeeze(1)[self._group]

    def _view(self, target: Any, args: Any, kwargs: Any) -> Any:
        table = args[0].tensor
        if target in (aten.t.default, aten.permute.default, aten.transpose.int) and table.ndim == 3:
            return _Table(table.transpose(1, 2))
        if target is aten.unsqueeze.default:
            # The function of one expert does not know the dimension of experts, which stands in front.
            dim = args[1] + table.ndim if args[1] < 0 else args[1]
            return _Table(table.unsqueeze(dim + 1))
        if torch.Tag.pointwise in target.tags or target is aten._to_copy.default:
            # Tables that meet tables, or numbers alone, stay tables; what meets rows becomes rows.
            if any(isinstance(value, _Table) for value in args[1:]) or len(args) == 1:
                raw = [value.tensor if isinstance(value, _Table) else value for value in args]
                return _Table(target(*raw, **kwargs))
            return target(self._per_row(args[0]), *args[1:], **kwargs)
        raise CannotChunk(Reason.NOT_LIFTED, f"{target} of a parameter cannot be lifted over experts")
