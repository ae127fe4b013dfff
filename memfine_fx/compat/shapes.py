"""Symbols of sizes: making one with a hint, and finding the hint of one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from memfine_fx.compat.checks import Feature, expect
from memfine_fx.compat.tensors import FakeTensorMode

__all__ = [
    "HINTS",
    "check_symbols",
    "hints_of_symbols",
    "mode_of_trace",
    "read_size",
    "symbolic_size",
    "unbacked_size",
]


class _ShapesOfTrace(ShapeEnv):
    """The symbols of a function that memfine_fx traces itself, where no line of a user's code makes a size."""

    def _get_user_frame(self) -> FrameType | None:
        # torch looks for a frame outside of itself, and imports torch.export and Inductor's code generation to know its
        # own files: 0.2 s that nothing else in an eager program needs.
        return inspect.currentframe()


def mode_of_trace(*, allow_non_fake_inputs: bool = False) -> tuple[FakeTensorMode, ShapeEnv]:
    """Return a mode of fake tensors, and its symbols, for one function that memfine_fx traces itself."""
    shape_env = _ShapesOfTrace()
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=allow_non_fake_inputs), shape_env


def symbolic_size(shape_env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """A new size that is unknown, with a number that heuristics take for it."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    symbol = shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    size = shape_env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


def read_size(graph: fx.Graph, count: fx.Node) -> fx.Node:
    """Return a new node that reads a size from a node's fake tensor [] int64, as a graph with `count.item()` does.

    It stands where the graph inserts nodes.
    """
    number = graph.call_function(torch.ops.aten._local_scalar_dense.default, (count,))
    fake_mode = count.meta["val"].fake_mode
    # Dynamo allows it by `capture_scalar_outputs`, for what it captures; this node comes later.
    fake_mode.allow_scalar_outputs = True
    size = unbacked_size(fake_mode.shape_env)
    number.meta.update(count.meta, val=size, unbacked_bindings={size.node.expr: ()})
    return number


def unbacked_size(shape_env: ShapeEnv) -> torch.SymInt:
    """A new size that data decide when a graph runs, as `torch.nonzero`'s."""
    with shape_env.ignore_fresh_unbacked_symbols():
        size = shape_env.create_unbacked_symint()
    assert isinstance(size, torch.SymInt)
    torch._check(size >= 0)  # type: ignore[no-untyped-call]
    return size


def hints_of_symbols(size: torch.SymInt) -> Mapping[sympy.Symbol, Any]:
    """Symbol -> its value in the captured call, for the symbols of a size's graph that have one."""
    if not HINTS.holds():
        return {}
    known: Mapping[sympy.Symbol, Any] = size.node.shape_env.backed_var_to_val
    return known


def check_symbols() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    mode, shape_env = mode_of_trace()
    size = symbolic_size(shape_env, "probe", 7)
    with mode:
        rows: Any = torch.empty((size, 3))
        traced = make_fx(torch.func.functionalize(lambda x: x * 2, remove="mutations"), tracing_mode="real")(rows)
    (product,) = [node for node in traced.graph.nodes if node.op == "call_function"]
    expect(product.target is torch.ops.aten.mul.Tensor, f"x * 2 is traced as {product.target}")
    expect(product.meta["val"].shape[0].node.expr == size.node.expr, "a traced size is not its argument's")
    expect(size.node.expr.is_Symbol and size.node.hint == 7, f"a new size is {size.node.expr}, about {size.node.hint}")


def _check_hints() -> None:
    size = symbolic_size(_ShapesOfTrace(), "probe", 7)
    known = size.node.shape_env.backed_var_to_val
    expect(int(known[size.node.expr]) == 7, f"a size of about 7 is {known}")


HINTS = Feature(
    name="ShapeEnv.backed_var_to_val",
    package="torch",
    purpose="values of symbols that no input's size is, such as the length of a saved random state",
    seen=("2.11", "2.15"),
    fallback="Sizes that no input has count as 1, so predicted peaks may be low and a memory_budget may be exceeded.",
    check=_check_hints,
)
