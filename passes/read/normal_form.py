"""Normal form: nodes of Dynamo's graph, run one by one as functional ATen on their fake tensors.

A callback gets every call of functional ATen as it happens: decomposed, mutations turned into new values, casts of
autocast written out. Whoever listens gives a value to its results, and knows which node of Dynamo's graph is running.
No graph is traced: what is not reached from a routing decision costs nothing, and reading can stop at the exit.

Three operations stay whole, because their own words say more than what they become: every spelling of a grouped matmul
is `memfine::grouped_mm`, an einsum in letters is `memfine::einsum` (with the dtype that autocast gives its operands),
and a batched `matmul` is one bmm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from memfine_fx.compat.autograd import enable_python_dispatcher
from memfine_fx.compat.functional import Listening, functional_value
from memfine_fx.compat.operators import HigherOrderOperator, OpOverload, OpOverloadPacket, without_write
from memfine_fx.compat.tensors import FakeTensor, FakeTensorMode, tree_leaves
from memfine_fx.errors import CannotChunk, Reason
from memfine_fx.passes.dataflow import has_unbacked_shape, node_value
from memfine_fx.passes.modes import Modes, enter_autocast
from memfine_fx.passes.ops import DROPOUTS, GROUPED_MATMULS, target_name

__all__ = ["RUN_ERRORS", "Call", "NormalForm", "fake_mode_of", "grouped_arguments"]

RUN_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError)


@torch.library.custom_op("memfine::grouped_mm", mutates_args=())
def grouped_mm(rows: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of group e times table[e]; a name for every spelling of it.

    NOTE: its fake implementation knows only shapes; the meta function of the real one demands bf16.

    Args:
        rows: [N,H], sorted by group.
        table: [E,H,F].
        offsets: [E] ints, end of each group.

    Returns:
        [N,F]; rows past the last offset are zero.
    """
    out = rows.new_zeros(rows.shape[0], table.shape[-1])
    start = 0
    for group, end in enumerate(offsets.tolist()):
        torch.mm(rows[start:end], table[group], out=out[start:end])
        start = end
    return out


@grouped_mm.register_fake
def _(rows: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], table.shape[-1])


@torch.library.custom_op("memfine::einsum", mutates_args=())
def einsum(equation: str, operands: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """`torch.einsum` as one call: its letters say more than the matmuls it becomes.

    Args:
        dtype: that operands are cast to; not a call of its own, since a cast of a parameter does not say where in it
            experts stand, and these letters do.
    """
    return torch.einsum(equation, [operand.to(dtype or operand.dtype) for operand in operands]).clone()


@einsum.register_fake
def _(equation: str, operands: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    result = torch.einsum(equation, [operand.to(dtype or operand.dtype) for operand in operands])
    return result.new_empty(result.shape)


class Call:
    """One call of functional ATen.

    Args:
        target: the overload.
        args, kwargs: fake tensors, numbers and lists of them.
        out: what it gave.
        node: of Dynamo's graph, that is running.
    """

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, node: fx.Node) -> None:
        self.target, self.args, self.kwargs, self.out, self.node = target, args, kwargs, out, node

    def shape(self, position: int = 0) -> Sequence[int | torch.SymInt]:
        """Return the shape of the argument at a position."""
        return self.args[position].shape  # type: ignore[no-any-return]  # a tensor

    def refused(self, reason: Reason, message: str) -> CannotChunk:
        """Why nothing can be proved of this call, at the node that it belongs to."""
        return CannotChunk(reason, message, self.node)

    def dropping_first(self) -> Call:
        """The same without its first argument: a product without the bias that it is added to."""
        return Call(self.target, self.args[1:], self.kwargs, self.out, self.node)

    @property
    def ndim(self) -> int:
        return self.out.ndim  # type: ignore[no-any-return]  # a tensor

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that may stand in either place."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


class NormalForm:
    """Runs nodes of one graph and tells every call of functional ATen.

    Args:
        graph: of Dynamo, with recorded fake values; not changed.
        modes: of every node.
        tell: called with each `Call`.
    """

    def __init__(self, graph: fx.Graph, modes: dict[fx.Node, Modes], tell: Callable[[Call], None]) -> None:
        self._modes = modes
        self._tell = tell
        self._running: fx.Node | None = None
        self._held: list[Any] = []
        self._env: dict[fx.Node, Any] = {}
        self._outside: dict[fx.Node, torch.Tensor] = {}
        self._nodes = [node for node in graph.nodes if isinstance(node_value(node), torch.Tensor)]

    def reading(self, read: Callable[[], None]) -> None:
        """Call `read`; inside it, `run` may be called."""
        values = [node_value(node) for node in self._nodes]
        fake_mode = fake_mode_of(values)
        shape_env = None if fake_mode is None else fake_mode.shape_env

        def body(*tensors: torch.Tensor) -> None:
            self._outside = dict(zip(self._nodes, tensors, strict=True))
            read()
            self._running = None

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(fake_mode or contextlib.nullcontext())
            if shape_env is not None:  # sizes that only the routing knows get new symbols; nobody needs to bind them
                stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(Listening(self._notice_call))
            torch.func.functionalize(body, remove="mutations")(*values)

    def holds(self, node: fx.Node) -> bool:
        """Whether a node has been run."""
        return node in self._env

    def forget(self, nodes: Sequence[fx.Node]) -> None:
        """Take back that nodes have been run; they must not have written into tensors from outside."""
        for node in nodes:
            self._env.pop(node, None)

    def result(self, node: fx.Node) -> Any:
        """Return the result that a node has now, as run or recorded by Dynamo; tensors as they are after all writes."""
        if node in self._env:
            return self._env[node]
        return self._outside.get(node, node_value(node))

    def tensors(self, result: Any) -> Iterator[torch.Tensor]:
        """The fake tensors behind a result."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                yield functional_value(leaf)

    def run(self, node: fx.Node) -> None:
        """Run one call on what its arguments are now.

        Raises:
            CannotChunk: it cannot be run on fake tensors.
        """
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
        self._running = node  # and stays: views that are recomputed after a write belong to it
        try:
            with enter_autocast(self._modes[node]):
                self._env[node] = _called(node, args, kwargs)
        except CannotChunk:
            raise
        except RUN_ERRORS as error:
            reason = str(error).strip().partition("\n")[0]
            raise CannotChunk(Reason.UNREADABLE, f"retracing {target_name(node)} failed: {reason}", node) from error

    def _argument(self, node: fx.Node) -> Any:
        value = self.result(node)
        if not isinstance(value, torch.SymFloat):
            return value
        if has_unbacked_shape(node):
            raise CannotChunk(
                Reason.ROWS_NOT_FOLLOWED, "a number of rows, which only the routing knows, as a float", node
            )
        return float(value)  # the capture's guards keep it so

    def _notice_call(self, target: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self._running is None or not isinstance(target, OpOverload) or target.namespace == "prim":
            return
        self._held.append(out)  # values are compared by identity, so results must stay alive
        # What torch's own code writes below functionalization (rms_norm's `add_`) is a new value of the same tensor.
        self._tell(Call(without_write(target) or target, args, kwargs, out, self._running))


def fake_mode_of(values: Sequence[object]) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor among `values`."""
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    name, target = target_name(node), node.target
    if node.op == "call_method":
        if name in ("matmul", "__matmul__") and not kwargs and args[0].ndim >= 2 and args[1].ndim >= 3:
            return _batched_matmul(args[0], args[1])
        return getattr(args[0], str(target))(*args[1:], **kwargs)
    if node.op != "call_function" or isinstance(target, HigherOrderOperator) or not callable(target):
        raise CannotChunk(Reason.OPAQUE, f"the region holds a {node.op} node", node)
    if name in GROUPED_MATMULS:
        return _grouped(node, args, kwargs)
    if name == "setitem" and _puts_rows(*args):
        args[0].index_put_((args[1],), args[2])
        return None
    if name == "einsum" and isinstance(args[0], str) and "->" in args[0] and "." not in args[0]:
        operands = list(args[1] if isinstance(args[1], (tuple, list)) else args[1:])
        if not torch.is_autocast_enabled(_device_type(args)):
            return einsum(args[0], operands)
        if _is_one_product(args[0]) and torch.float64 not in [operand.dtype for operand in operands]:
            return einsum(args[0], operands, torch.get_autocast_dtype(_device_type(args)))
    if name in DROPOUTS and _draws(args, kwargs):
        raise CannotChunk(Reason.RANDOM_NUMBERS, "random numbers are drawn inside the experts (dropout)", node)
    if name == "matmul" and len(args) == 2 and not kwargs and args[0].ndim >= 2 and args[1].ndim >= 3:
        return _batched_matmul(args[0], args[1])
    return target(*args, **kwargs)


def _is_one_product(equation: str) -> bool:
    """Whether an einsum is a single bmm of its operands as they are, which is what autocast acts on."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if len(letters) != 2 or any(len(set(own)) != len(own) for own in letters):
        return False
    left, right = map(set, letters)
    return bool(left & right - set(output)) and left ^ right <= set(output)  # none is summed in one operand alone


def _draws(args: Any, kwargs: Any) -> bool:
    """Whether dropout(x, p, training) is in training with p above zero."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    return bool(training) and p != 0


def _puts_rows(written: object, index: object, rows: object) -> bool:
    """Whether rows are written at integers; Python's own way takes off leading dimensions of one, which T = 1 has."""
    is_at_places = isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32)
    return isinstance(written, torch.Tensor) and is_at_places and isinstance(rows, torch.Tensor)


def _batched_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` as one bmm over broadcast batches; torch folds some into an mm, as gradients are wanted or not."""
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    left_batch, right_batch = (
        tensor.expand(*batch, *tensor.shape[-2:]).reshape(-1, *tensor.shape[-2:]) for tensor in (left, right)
    )
    return torch.bmm(left_batch, right_batch).view(*batch, left.shape[-2], right.shape[-1])


def _device_type(args: Any) -> str:
    return next(leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))


def is_grouped_matmul(target: Any) -> bool:
    """Whether a call target is a grouped matmul in any of its spellings."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return str(target).split(".")[1] in GROUPED_MATMULS
    return str(getattr(target, "__name__", "")).split(".")[0] in GROUPED_MATMULS


def _grouped(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    rows, table, offsets, out_dtype = grouped_arguments(node, args, kwargs)
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
        raise CannotChunk(
            Reason.UNREADABLE, "grouped matmul without offsets is a plain batched matmul, not routed rows", target
        )
    if rows.ndim != 2 or table.ndim != 3:
        raise CannotChunk(
            Reason.UNREADABLE,
            f"grouped matmul of {rows.ndim}-D by {table.ndim}-D; expected rows [N,H] by [E,H,F]",
            target,
        )
    if named.get("bias") is not None:
        raise CannotChunk(Reason.UNREADABLE, "grouped matmul with a bias argument", target)
    return rows, table, named["offs"], named.get("out_dtype") or rows.dtype
