"""Tracing of functions over a chunk's rows, with symbolic row count R and, where lifted, group count G."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memfine_fx.compat.autograd import enable_python_dispatcher, without_autocast, without_saved_tensor_hooks
from memfine_fx.compat.shapes import mode_of_trace, symbolic_size
from memfine_fx.compat.tensors import FakeTensor, FakeTensorMode, disable_fake_tensor_cache

__all__ = [
    "TensorSpec",
    "TracedFunction",
    "add_call",
    "add_cast",
    "contiguous_strides",
    "copied_module",
    "is_transpose",
    "trace_rows",
]

aten = torch.ops.aten
_ROWS_HINT = 2053
_GROUPS_HINT = 17
"""Primes near usual sizes: nothing else equals them, and Inductor's heuristics see realistic numbers."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides, dtype and device of one argument; R or G goes in front of `shape` where it says so."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    per_row: bool = False
    per_group: bool = False
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TracedFunction:
    """A function as functional ATen over R symbolic rows.

    Args:
        graph_module: placeholders carry their fake tensors in `meta["val"]`.
        fake_mode: the mode of those tensors.
        fake_inputs: the fake arguments, in order.
        rows, groups: the symbols of R and G in the graph's sizes.
    """

    graph_module: fx.GraphModule
    fake_mode: FakeTensorMode
    fake_inputs: tuple[torch.Tensor, ...]
    rows: sympy.Symbol
    groups: sympy.Symbol


def trace_rows(function: Callable[..., Any], specs: Sequence[TensorSpec]) -> TracedFunction:
    """Trace `function` to ATen on fake arguments of the given specs.

    Args:
        function: takes one tensor per spec, returns a tensor or a flat sequence of tensors.
        specs: arguments; all `per_row` ones share the symbol R.
    """
    fake_mode, shape_env = mode_of_trace()
    num_rows = symbolic_size(shape_env, "num_rows", _ROWS_HINT)
    num_groups = symbolic_size(shape_env, "num_groups", _GROUPS_HINT)
    with (
        without_saved_tensor_hooks(),
        fake_mode,
        disable_fake_tensor_cache(fake_mode),  # storing a result costs what computing it does, and few are asked again
        torch.no_grad(),
        without_autocast(),
        enable_python_dispatcher(),
    ):
        inputs = tuple(_fake(spec, num_rows, num_groups) for spec in specs)
        traced = make_fx(torch.func.functionalize(function, remove="mutations"), tracing_mode="real")(*inputs)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return TracedFunction(traced, fake_mode, inputs, num_rows.node.expr, num_groups.node.expr)


def _fake(spec: TensorSpec, num_rows: torch.SymInt, num_groups: torch.SymInt) -> torch.Tensor:
    if spec.per_row:
        return torch.empty((num_rows, *spec.shape), dtype=spec.dtype, device=spec.device)
    inner = spec.stride if spec.stride is not None else contiguous_strides(spec.shape)
    if spec.per_group:
        shape: tuple[int | torch.SymInt, ...] = (num_groups, *spec.shape)
        strides = (math.prod(spec.shape), *inner)
    else:
        shape, strides = spec.shape, inner
    return torch.empty_strided(shape, strides, dtype=spec.dtype, device=spec.device)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[position + 1 :]) for position in range(len(shape)))


def copied_module(module: fx.GraphModule) -> fx.GraphModule:
    """Return the same graph in nodes of its own, under the same names."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def add_call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call at a traced graph's place of insertion, with its fake result, so that the graph stays valid."""
    node = graph.call_function(target, args, kwargs)
    values = [argument.meta["val"] if isinstance(argument, fx.Node) else argument for argument in args]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    with mode, torch.no_grad():
        node.meta["val"] = target(*values, **kwargs)
    return node


def add_cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A node in another dtype, itself where it has that one."""
    if node.meta["val"].dtype == dtype:
        return node
    return add_call(graph, torch.ops.aten._to_copy.default, node, dtype=dtype)


def is_transpose(view: fx.Node) -> bool:
    """Whether a node swaps the last dimension of a tensor [..,a,b] with another."""
    num_dims = view.meta["val"].ndim
    order = list(range(num_dims))
    if view.target is aten.permute.default:
        order = [dim % num_dims for dim in view.args[1]]  # type: ignore[union-attr]  # a list of ints
    elif view.target is aten.transpose.int:
        left, right = view.args[1:]
        order[left], order[right] = order[right], order[left]  # type: ignore[index]  # ints
    elif view.target is aten.t.default:
        order.reverse()
    return bool(order and order[-1] != num_dims - 1)
