"""Run an outlined region in fp64, whatever precision it was written in.

Grouped matmuls become plain ones, group by group; casts between floating types do nothing, dtypes that operations are
asked for become fp64, and what an operation gives in less than fp64 is widened. Rounding inside `to(float32)` is gone
with the cast, so the result is what the region means.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from memfine_fx.compat.operators import OpOverload, OpOverloadPacket, op_name
from memfine_fx.compat.tensors import tree_map
from memfine_fx.passes.dataflow import node_value
from memfine_fx.passes.ops import FLOAT_CASTS
from memfine_fx.passes.read.normal_form import grouped_arguments, is_grouped_matmul

__all__ = ["ExactRun"]

aten = torch.ops.aten
_NAMESPACES = ("aten", "prims", "memfine", "transformers")


class ExactRun(fx.Interpreter):
    """Interprets a region on fp64 inputs; differentiable."""

    def run_node(self, node: fx.Node) -> Any:
        self._running = node
        return super().run_node(node)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if op_name(target) == "rms_norm" or getattr(target, "__name__", "") == "rms_norm":
            args, kwargs = self._with_eps(*args, **kwargs)
        if isinstance(target, (OpOverload, OpOverloadPacket)) and str(target).split(".")[0] not in _NAMESPACES:
            args, kwargs = tree_map(_single, (args, kwargs))  # a library's kernel knows the dtypes it was written for
            return _widened(super().call_function(target, args, kwargs))
        if not is_grouped_matmul(target):
            args, kwargs = tree_map(_wide_dtype, (args, kwargs))
            if target is aten._softmax.default:
                args = (*args[:2], False)  # "half to float" is a cast too
            return _widened(super().call_function(target, args, kwargs))
        rows, table, offsets, _ = grouped_arguments(target, args, kwargs)
        bounds = [0, *offsets.tolist(), rows.shape[0]]
        pieces = [rows[start:end] @ table[group] for group, (start, end) in enumerate(pairwise(bounds[:-1]))]
        rest = rows.new_zeros(rows.shape[0] - bounds[-2], table.shape[-1])
        return torch.cat([*pieces, rest])

    def _with_eps(
        self, rows: Tensor, shape: Any, weight: Any = None, eps: float | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of rms_norm: without an eps it takes the dtype's, which is another in fp64."""
        (source, *_) = self._running.all_input_nodes
        recorded = node_value(source)
        dtype = recorded.dtype if isinstance(recorded, Tensor) else torch.float32
        return (rows, shape, weight, torch.finfo(dtype).eps if eps is None else eps), {}

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        is_cast = target in FLOAT_CASTS | {"to", "type"} and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if is_cast and not _asks_for_integers(args[1:], kwargs):
            return args[0]
        return _widened(super().call_method(target, args, kwargs))


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _single(value: Any) -> Any:
    """Return a kernel's argument in fp32 instead of fp64.

    A dtype below fp32 becomes fp32, too: the kernel would round to it in one form alone.
    """
    if isinstance(value, torch.dtype):
        return torch.float32 if value in (torch.bfloat16, torch.float16) else value
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float64 else value


def _asks_for_integers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    return any(not dtype.is_floating_point for dtype in dtypes)


def _widened(result: Any) -> Any:
    def widen(value: Any) -> Any:
        is_narrow = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
        return value.double() if is_narrow else value

    return tree_map(widen, result)
