"""Read what Inductor's compiled code allocates and frees, from the Python wrapper that it wrote.

The wrapper is the last word on memory: after fusion, reordering, in-place updates and reuse of buffers, it says
which storages are made (`buf = empty_strided_cpu(size, stride, dtype)`), renamed (`a = b`, `reinterpret_tensor`),
returned by other ops (`torch.ops...`) and dropped (`del buf`), with sizes in the graph's own symbols. It is there
on cache hits too. Sizes of what other ops return are taken from the FX graph that was compiled.

A wrapper in another form (C++, partitions for CUDA graphs) is answered with None and a warning: no timeline, no guess.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import sympy
import torch
from torch import fx

from memfine_fx.compat.functorch import call_under_random_state
from memfine_fx.compat.inductor import WRAPPERS
from memfine_fx.compat.operators import OpOverload, viewed_arguments
from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.memory.kernel_scratch import scratch_bytes
from memfine_fx.memory.liveness import OP_PHASES, Allocation, Call, CountedInputs, GraphMemory, call_of
from memfine_fx.memory.sizes import size_expr

__all__ = ["READER_FILES", "read_wrapper"]

READER_FILES = tuple(sorted(str(path) for path in Path(__file__).parent.glob("*.py")))
"""What a record follows from beside the wrapper and, for scratch inside kernels, `machine.measurement_key`."""

_PHASES = {f"torch.ops.memfine.{name}.default": phase for name, phase in OP_PHASES.items()}
_KEEPING, _FINDING = (f"torch.ops.memfine.{name}.default" for name in ("experts_keeping", "experts_backward_kept"))
_KEPT_ARGUMENT = 8  # of the latter: what the former kept
_REDUCTIONS = ("sum", "prod", "amin", "amax", "any")
_CUDA_BLOCK = 512  # CUDACachingAllocator rounds every request up to this


class _Unreadable(Exception):
    """The wrapper has a form that is not known."""


def read_wrapper(source: str, graph: fx.Graph, inputs: CountedInputs | None = None) -> GraphMemory | None:
    """The timeline of a compiled graph; None, with a `CompatibilityWarning`, if its wrapper cannot be read.

    A graph that calls nothing is never compiled and has no wrapper: None, and nothing is lost.

    Args:
        source: the wrapper's Python source.
        graph: the FX graph it was compiled from, with `meta["val"]`.
        inputs: those that count (tensors saved for backward, tangents); they are alive from the start, and freed
            where the wrapper drops them if nobody else holds them. None where it is None.
    """
    if not source and not any(node.op.startswith("call_") for node in graph.nodes):
        return None
    inputs = inputs or CountedInputs()
    try:
        body = _call_body(ast.parse(source))
        reader = _Reader(_bytes_of_ops(graph), _input_bytes(graph, inputs.freed), _input_bytes(graph, inputs.held))
        for statement in _flatten(body):
            reader.read(statement)
        return reader.finish()
    except (_Unreadable, SyntaxError, IndexError, KeyError, StopIteration) as error:
        WRAPPERS.miss(f"a wrapper cannot be read: {type(error).__name__}: {error}")
        return None


def _call_body(module: ast.Module) -> list[ast.stmt]:
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    if any(function.name.startswith("partition_") for function in functions):
        raise _Unreadable("partitions")
    calls = [function for function in functions if function.name == "call"]
    if len(calls) != 1:
        raise _Unreadable("no single call function")
    return calls[0].body


def _flatten(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _flatten(statement.body)
        else:
            yield statement


@dataclass(frozen=True)
class _OpBytes:
    """Bytes of one call of an op: its results, and what it needs while it runs.

    `views` has for each result the place of the argument that it is a view of, or None.
    """

    results: list[sympy.Expr]
    scratch: sympy.Expr
    views: list[int | None]


def _bytes_of_ops(graph: fx.Graph) -> dict[str, list[_OpBytes]]:
    """Op as the wrapper spells it -> its calls."""
    nodes = [node for node in graph.nodes if isinstance(call_under_random_state(node)[0], OpOverload)]
    # Of an op that takes complex numbers somewhere the wrapper calls those nodes alone; kernels do what is real.
    complex_ones = {node for node in nodes if _touches_complex(node)}
    of_complex = {node.target for node in complex_ones}
    calls: dict[str, list[_OpBytes]] = defaultdict(list)
    for node in nodes:
        if node.target not in of_complex or node in complex_ones:
            results = [_tensor_bytes(one) for one in _values(node)]
            if isinstance(node.target, OpOverload):
                found = _OpBytes(results, scratch_bytes(node), viewed_arguments(node.target))
                calls[f"torch.ops.{node.target}"].append(found)
            else:  # one that saves a random state, or runs another from such a state
                found = _OpBytes(results, scratch_bytes(node), [None] * len(results))
                calls[f"torch.ops.higher_order.{node.target}"].append(found)
    return calls


def _touches_complex(node: fx.Node) -> bool:
    values = [value for one in (node, *node.all_input_nodes) for value in _values(one)]
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


def _values(node: fx.Node) -> list[object]:
    """Results of a node, one after the other where they are nested."""
    return tree_leaves(node.meta.get("val"))


def _input_bytes(graph: fx.Graph, names: Collection[str]) -> dict[str, sympy.Expr]:
    placeholders = {str(node.target): node.meta.get("val") for node in graph.nodes if node.op == "placeholder"}
    return {name: _tensor_bytes(value) for name, value in placeholders.items() if name in names}


def _tensor_bytes(value: object) -> sympy.Expr:
    if not isinstance(value, torch.Tensor):
        return sympy.Integer(0)
    sizes = [size_expr(size) for size in value.shape]
    strides = [size_expr(stride) for stride in value.stride()]
    return _rounded(_storage_elements(sizes, strides) * value.dtype.itemsize, value.device.type)


def _storage_elements(sizes: list[sympy.Expr], strides: list[sympy.Expr]) -> sympy.Expr:
    if any(size == 0 for size in sizes):
        return sympy.Integer(0)
    last = sum(((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)), sympy.Integer(0))
    return sympy.expand(last + 1)


def _rounded(num_bytes: sympy.Expr, device_type: str) -> sympy.Expr:
    if device_type != "cuda":
        return num_bytes
    if num_bytes.is_number:
        return sympy.Integer(-(-int(num_bytes) // _CUDA_BLOCK) * _CUDA_BLOCK)
    return _CUDA_BLOCK * sympy.ceiling(num_bytes / _CUDA_BLOCK)


@dataclass
class _Storage:
    allocation: Allocation
    names: set[str] = field(default_factory=set)


class _Reader:
    """Walks the statements; knows which names hold which storages."""

    def __init__(
        self, ops: dict[str, list[_OpBytes]], freed: dict[str, sympy.Expr], held: dict[str, sympy.Expr]
    ) -> None:
        self._ops = {name: iter(calls) for name, calls in ops.items()}
        self._storages: list[_Storage] = []
        self._held: dict[str, list[_Storage]] = {}  # a name holds one storage, or all results of an op
        self._calls: list[Call] = []
        self._position = 0
        for name, num_bytes in freed.items():
            self._hold(name, [self._new(name, num_bytes, is_input=True)])
        for name, num_bytes in held.items():  # under no name of the wrapper, which can drop none of them
            self._new(name, num_bytes, is_input=True)

    def read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self._assign(statement.targets[0].id, statement.value)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    self._drop(target.id)
        self._position += 1

    def finish(self) -> GraphMemory:
        allocations = tuple(storage.allocation for storage in self._storages)
        return GraphMemory(allocations, tuple(self._calls), self._position)

    def _assign(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Name):
            self._hold(name, self._held.get(value.id, []))
        elif isinstance(value, ast.Subscript):
            self._element(name, value)
        elif isinstance(value, ast.Call):
            self._call(name, value)

    def _element(self, name: str, element: ast.Subscript) -> None:
        """Of what an op returned: `buf[2]`, or `buf[1][0]` behind the random state that stands first in `buf`."""
        places, source = [element.slice], element.value
        if isinstance(source, ast.Subscript):
            places, source = [source.slice, element.slice], source.value
        found = [one.value for one in places if isinstance(one, ast.Constant) and isinstance(one.value, int)]
        held = self._held.get(source.id, []) if isinstance(source, ast.Name) else []
        if len(found) == len(places) and sum(found) < len(held):
            self._hold(name, [held[sum(found)]])

    def _call(self, name: str, call: ast.Call) -> None:
        function = ast.unparse(call.func)
        if function == "reinterpret_tensor":
            source = call.args[0]
            self._hold(name, self._held.get(source.id, []) if isinstance(source, ast.Name) else [])
        elif function.startswith("empty_strided_"):
            device_type = function.removeprefix("empty_strided_").removesuffix("_pinned").split("_")[0]
            self._hold(name, [self._new(name, _requested_bytes(call, device_type))])
        elif function.startswith("torch.ops.") and function in self._ops:
            label = function.removeprefix("torch.ops.")
            op = next(self._ops[function])
            viewed = self._viewed(call, op.views[0]) if len(op.views) == 1 else None
            made = [self._new(label, num_bytes) for num_bytes in op.results] if viewed is None else viewed
            self._hold(name, made)
            if function in _KEEPING:
                _keep(self._held[name][1:-1], _texts(call))  # the last is how many rows were kept
            elif function in _FINDING:
                _keep(self._listed(call.args[_KEPT_ARGUMENT]), _texts(call))
            if _PHASES.get(function) == "backward":
                _number(self._held[name], _texts(call)[0])
            if op.scratch:
                self._hold_here(f"scratch of {label}", op.scratch)
            if function in _PHASES:
                self._calls.append(call_of(self._position, _PHASES[function], _texts(call)))
        elif (reduced := _reduced(call)) is not None:
            self._hold(name, [self._new(name, reduced.result)])
            if reduced.converted is not None:
                self._hold_here(f"sums of {name}", reduced.converted)
        elif name.startswith("buf"):
            raise _Unreadable(f"{name} = {function}(...)")

    def _viewed(self, call: ast.Call, place: int | None) -> list[_Storage] | None:
        """The storage of the argument at a place, none for an input that does not count; None where there is no such.

        The result of an op that gives a view, as that of complex numbers as real ones, is no memory of its own.
        """
        if place is None or place >= len(call.args):
            return None
        argument = call.args[place]
        if isinstance(argument, ast.Call) and ast.unparse(argument.func) == "reinterpret_tensor":
            argument = argument.args[0]
        return self._held.get(argument.id, []) if isinstance(argument, ast.Name) else None

    def _listed(self, names: ast.expr) -> list[_Storage]:
        """Storages of the names in a list but the last, which is how many rows were kept."""
        found = names.elts[:-1] if isinstance(names, ast.List) else []
        return [one for name in found if isinstance(name, ast.Name) for one in self._held.get(name.id, [])]

    def _new(self, name: str, num_bytes: sympy.Expr, *, is_input: bool = False) -> _Storage:
        storage = _Storage(Allocation(name, num_bytes, self._position, None, is_input))
        self._storages.append(storage)
        return storage

    def _hold_here(self, name: str, num_bytes: sympy.Expr) -> None:
        """What is alive while one statement runs."""
        self._storages.append(_Storage(Allocation(name, num_bytes, self._position, self._position + 1)))

    def _hold(self, name: str, storages: list[_Storage]) -> None:
        self._drop(name)
        self._held[name] = storages
        for storage in storages:
            storage.names.add(name)

    def _drop(self, name: str) -> None:
        for storage in self._held.pop(name, []):
            storage.names.discard(name)
            if not storage.names:
                storage.allocation = replace(storage.allocation, stop=self._position)


def _keep(storages: Iterable[_Storage], texts: Sequence[str]) -> None:
    for storage in storages:
        storage.allocation = replace(storage.allocation, kept_by=texts[0])


def _number(storages: Iterable[_Storage], site: str) -> None:
    for place, storage in enumerate(storages):
        storage.allocation = replace(storage.allocation, result_of=(site, place))


def _requested_bytes(call: ast.Call, device_type: str) -> sympy.Expr:
    size, stride, dtype = call.args[:3]
    if not (isinstance(size, ast.Tuple) and isinstance(stride, ast.Tuple)):
        raise _Unreadable(ast.unparse(call))
    elements = _storage_elements([_sized(one) for one in size.elts], [_sized(one) for one in stride.elts])
    itemsize = getattr(torch, ast.unparse(dtype).removeprefix("torch.")).itemsize
    return _rounded(elements * itemsize, device_type)


@dataclass(frozen=True)
class _Reduced:
    """Bytes of what a reduction leaves, and of the sums in fp32 that this was converted from, if it was."""

    result: sympy.Expr
    converted: sympy.Expr | None


def _reduced(call: ast.Call) -> _Reduced | None:
    """The last step of a reduction that a CUDA kernel leaves to the wrapper, in parts that stand in a workspace:
    `workspace[start : stop].view(parts, n).sum(dim=0).view([...]).to(torch.bfloat16)`, of which the last two may miss.
    """
    methods: list[tuple[str, ast.Call]] = []
    value: ast.expr = call
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        methods.insert(0, (value.func.attr, value))
        value = value.func.value
    names = [name for name, _ in methods]
    if not isinstance(value, ast.Subscript) or len(names) < 2 or names[0] != "view" or len(methods[0][1].args) != 2:
        return None
    if names[1] not in _REDUCTIONS or any(name not in ("view", "to") for name in names[2:]):
        return None
    count = _sized(methods[0][1].args[1])
    sums = _rounded(count * torch.float32.itemsize, "cuda")
    dtypes = [ast.unparse(one.args[0]).removeprefix("torch.") for name, one in methods if name == "to"]
    if not dtypes:
        return _Reduced(sums, None)
    return _Reduced(_rounded(count * getattr(torch, dtypes[-1]).itemsize, "cuda"), sums)


def _sized(node: ast.expr) -> sympy.Expr:
    """A size of the wrapper as an expression; its symbols are the graph's."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return sympy.Integer(node.value)
    if isinstance(node, ast.Name):
        return sympy.Symbol(node.id, positive=True, integer=True)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_sized(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _sized(node.left), _sized(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            return sympy.floor(left / right)
        if isinstance(node.op, ast.Pow):
            return left**right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
        function = sympy.Max if node.func.id == "max" else sympy.Min
        return function(*(_sized(argument) for argument in node.args))
    raise _Unreadable(ast.unparse(node))


def _texts(call: ast.Call) -> list[str]:
    return [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
