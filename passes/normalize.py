"""Normalise: outline one cut and retrace it alone to functional ATen.

Steps:
1. copy the inside of the cut to a graph of its own, one placeholder per input;
2. replace every spelling of a grouped matmul by `memfine::grouped_mm`, whose fake implementation knows only
   shapes (NOTE: the meta function of the real one demands bf16, so retracing fp32 models would fail), and
   `torch.einsum` by `memfine::einsum`, which keeps its letters (not under autocast, which acts on its insides);
3. retrace with `make_fx` on the fake tensors of the capture, functionalised, under the autocast state of the
   region's place in the graph.

Refuses: inputs without a recorded value; symbols that are neither tensors, ints nor floats; whatever
tracing itself refuses.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memfine_fx.compat.autograd import enable_python_dispatcher
from memfine_fx.compat.operators import OpOverload, OpOverloadPacket
from memfine_fx.compat.tensors import FakeTensor, FakeTensorMode, tree_leaves
from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import node_value, written_node
from memfine_fx.passes.find import GROUPED_MATMULS
from memfine_fx.passes.modes import Modes, enter_autocast
from memfine_fx.passes.read.normal_form import einsum, grouped_mm
from memfine_fx.records import Cut

__all__ = [
    "NormalizedRegion",
    "fake_mode_of",
    "grouped_arguments",
    "is_grouped_matmul",
    "normalize",
    "outline",
    "outline_with_map",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NormalizedRegion:
    """A cut as functional ATen.

    Args:
        graph_module: placeholders stand in the order of `inputs`.
        inputs: the outer nodes behind the placeholders (symbolic ints included).
    """

    graph_module: fx.GraphModule
    inputs: tuple[fx.Node, ...]


def normalize(cut: Cut, modes: Modes) -> NormalizedRegion:
    """Outline `cut` and retrace it under `modes`.

    Raises:
        CannotChunk: see the module docstring.
    """
    outlined, inputs = outline(cut, specializes_floats=True)
    values = [node_value(node) for node in inputs]
    fake_mode = fake_mode_of(values)
    runner = _GroupedMatmulRenamer(outlined)

    def region(*args: Any) -> Any:
        return torch.func.functionalize(runner.run, remove="mutations")(*args)

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(fake_mode or contextlib.nullcontext())
            stack.enter_context(_ignoring_new_symbols(fake_mode))
            stack.enter_context(enter_autocast(modes))
            traced = make_fx(region, tracing_mode="real")(*values)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CannotChunk(f"retracing the region failed: {reason}", cut.exit) from error
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return NormalizedRegion(traced, tuple(inputs))


class _GroupedMatmulRenamer(fx.Interpreter):
    """Runs the outlined region; grouped matmuls and einsums become ops of ours, batched matmuls one bmm each."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = _short_name(target)
        if name in GROUPED_MATMULS:
            return _grouped(target, args, kwargs)
        is_einsum = name == "einsum" and isinstance(args[0], str) and not torch.is_autocast_enabled(_device_type(args))
        if is_einsum and "->" in args[0] and "." not in args[0]:
            return einsum(args[0], list(args[1] if isinstance(args[1], (tuple, list)) else args[1:]))
        if name in _DROPOUTS and _draws(args, kwargs):
            raise CannotChunk("random numbers are drawn inside the experts (dropout)", target)
        if name == "matmul" and len(args) == 2 and not kwargs and args[0].ndim >= 2 and args[1].ndim >= 3:
            return _batched_matmul(args[0], args[1])
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in ("matmul", "__matmul__") and not kwargs and args[0].ndim >= 2 and args[1].ndim >= 3:
            return _batched_matmul(args[0], args[1])
        return super().call_method(target, args, kwargs)


_DROPOUTS = frozenset(("dropout", "dropout1d", "dropout2d", "alpha_dropout", "feature_alpha_dropout"))


def _draws(args: Any, kwargs: Any) -> bool:
    """Whether dropout(x, p, training) is in training with p above zero."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    return bool(training) and p != 0


def _batched_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` as one bmm over broadcast batches; torch folds some into an mm, as gradients are wanted or not."""
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    one, other = (tensor.expand(*batch, *tensor.shape[-2:]).reshape(-1, *tensor.shape[-2:]) for tensor in (left, right))
    return torch.bmm(one, other).view(*batch, left.shape[-2], right.shape[-1])


def _device_type(args: Any) -> str:
    return next(leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))


def is_grouped_matmul(target: Any) -> bool:
    """Whether a call target is a grouped matmul in any of its spellings."""
    return _short_name(target) in GROUPED_MATMULS


def _short_name(target: Any) -> str:
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return str(target).split(".")[1]
    return str(getattr(target, "__name__", "")).split(".")[0]


def _grouped(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    rows, table, offsets, out_dtype = grouped_arguments(target, args, kwargs)
    return grouped_mm(rows, table, offsets).to(out_dtype)  # type: ignore[no-any-return]  # custom_op is untyped


def grouped_arguments(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype]:
    """(rows, table, offsets, output dtype) of a grouped matmul in any of its spellings.

    Raises:
        CannotChunk: without offsets, with a bias, or of other than rows [N,H] by [E,H,F].
    """
    named = dict(zip(("rows", "table", "offs", "bias", "out_dtype"), args, strict=False)) | kwargs
    rows = named.get("rows", named.get("input", named.get("self", named.get("mat_a"))))
    table = named.get("table", named.get("weight", named.get("mat2", named.get("mat_b"))))
    if rows is None or table is None or named.get("offs") is None:
        raise CannotChunk("grouped matmul without offsets is a plain batched matmul, not routed rows", target)
    if rows.ndim != 2 or table.ndim != 3:
        raise CannotChunk(f"grouped matmul of {rows.ndim}-D by {table.ndim}-D; expected rows [N,H] by [E,H,F]", target)
    if named.get("bias") is not None:
        raise CannotChunk("grouped matmul with a bias argument", target)
    return rows, table, named["offs"], named.get("out_dtype") or rows.dtype


def outline(cut: Cut, *, specializes_floats: bool) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The inside of a cut as a graph of its own, and the outer nodes behind its placeholders.

    Args:
        cut: what to copy.
        specializes_floats: turn symbolic floats into numbers (the capture's guards keep that sound).

    Raises:
        CannotChunk: an input has no recorded value, or the inside holds something that is not a call.
    """
    outlined, env = outline_with_map(cut, specializes_floats=specializes_floats)
    return outlined, [node for node in cut.inputs if isinstance(env[node], fx.Node)]


def outline_with_map(cut: Cut, *, specializes_floats: bool) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
    """As `outline`; also what became of each node: its copy, or the number it was specialised to."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in cut.inputs:
        value = node_value(node)
        if specializes_floats and isinstance(value, (torch.SymFloat, float)):
            env[node] = float(value)
        elif isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, int, float)):
            env[node] = graph.placeholder(node.name)
        elif value is None and node.op == "get_attr":
            raise CannotChunk(f"a function that was captured whole ({_caller(node)}) stands among the experts", node)
        else:
            raise CannotChunk(f"input of the region has no recorded tensor or size, but {type(value).__name__}", node)
    for node in cut.nodes:
        if node.op not in ("call_function", "call_method"):
            raise CannotChunk(f"the region holds a {node.op} node", node)
        copied = graph.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, env.__getitem__),
            fx.map_arg(node.kwargs, env.__getitem__),
        )
        env[node] = copied
    graph.output(env[written_node(cut.exit)])
    return fx.GraphModule(torch.nn.Module(), graph), env


def _caller(body: fx.Node) -> str:
    """What calls a body that was captured whole: an autograd.Function, a checkpoint, a branch, a loop."""
    names = [str(getattr(user.target, "_name", user.target)) for user in body.users]
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) or body.name


def _ignoring_new_symbols(fake_mode: FakeTensorMode | None) -> contextlib.AbstractContextManager[None]:
    """Sizes that only the routing knows get new symbols in a retrace; nobody needs to bind them."""
    shape_env = None if fake_mode is None else fake_mode.shape_env
    return contextlib.nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()


def fake_mode_of(values: Sequence[object]) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor among `values`."""
    modes = {value.fake_mode for value in values if isinstance(value, FakeTensor)}
    return next(iter(modes), None)
