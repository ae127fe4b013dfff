"""Read what Inductor's compiled code allocates and frees, from the Python wrapper that it wrote.

The wrapper is the last word on memory: after fusion, reordering, in-place updates and reuse of buffers, it says
which storages are made (`buf = empty_strided_cpu(size, stride, dtype)`), renamed (`a = b`, `reinterpret_tensor`),
returned by other ops (`torch.ops...`) and dropped (`del buf`), with sizes in the graph's own symbols. It is there
on cache hits too. Sizes of what other ops return are taken from the FX graph that was compiled. What a product of
matrices takes inside follows from the factors that it is called with.

A wrapper in another form (C++, partitions for CUDA graphs) is answered with None and a warning: no timeline, no guess.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import sympy
import torch
from torch import fx

from memfine_fx.compat.functorch import call_under_random_state
from memfine_fx.compat.inductor import WRAPPERS
from memfine_fx.compat.operators import OpOverload, viewed_arguments
from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.memory.graph_peak import rows_by_symbol
from memfine_fx.memory.kernel_scratch import product_scratch, scratch_bytes
from memfine_fx.memory.liveness import OP_PHASES, Allocation, Call, CountedInputs, GraphMemory, call_of
from memfine_fx.memory.products import MULTIPLYING, product_of
from memfine_fx.memory.sizes import size_expr

__all__ = ["READER_FILES", "read_wrapper"]

READER_FILES = tuple(sorted(str(path) for path in Path(__file__).parent.glob("*.py")))
"""What a record follows from beside the wrapper and, for scratch inside kernels, `machine.measurement_key`."""

_PHASES = {f"torch.ops.memfine.{name}.default": phase for name, phase in OP_PHASES.items()}
_SAVING, _FINDING = (f"torch.ops.memfine.{name}.default" for name in ("experts_saving", "experts_backward_saved"))
_SAVED_ARGUMENT = 8  # of the latter: what the former saved
_PRODUCTS = tuple(f"extern_kernels.{name}" for name in MULTIPLYING)
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_AS_OP = re.compile(r"^extern_kernels\.(\w+)$")
"""A kernel that returns its result, as that of a convolution, is spelled so instead of as its op."""
_ROUNDINGS = {"math.floor": sympy.floor, "math.ceil": sympy.ceiling}
_OPERATIONS: dict[type[ast.operator], Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_REDUCTIONS = ("sum", "prod", "amin", "amax", "any")
_SOURCES = re.compile(r"# Topologically Sorted Source Nodes: \[([^]]+)\]")
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
        lines = source.splitlines()
        reader = _Reader(lines, _bytes_of_ops(graph), _layouts_of_inputs(graph), inputs, rows_by_symbol(graph))
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
class _Layout:
    """How a tensor lies in memory."""

    sizes: list[sympy.Expr]
    strides: list[sympy.Expr]
    dtype: torch.dtype
    device_type: str

    @property
    def num_bytes(self) -> sympy.Expr:
        """Return the bytes of the storage that the tensor needs."""
        elements = _storage_elements(self.sizes, self.strides)
        return _rounded(elements * self.dtype.itemsize, self.device_type)


@dataclass(frozen=True)
class _OpBytes:
    """One call of an op: its results, None for one that is no tensor, and what it needs while it runs.

    `views` has for each result the place of the argument that it is a view of, or None; `node` is the graph's.
    """

    results: list[_Layout | None]
    scratch: sympy.Expr
    views: list[int | None]
    node: str


def _bytes_of_ops(graph: fx.Graph) -> dict[str, list[_OpBytes]]:
    """Op as the wrapper spells it -> its calls."""
    nodes = [node for node in graph.nodes if isinstance(call_under_random_state(node)[0], OpOverload)]
    # Of an op that takes complex numbers somewhere the wrapper calls those nodes alone; kernels do what is real.
    complex_ones = {node for node in nodes if _touches_complex(node)}
    of_complex = {node.target for node in complex_ones}
    calls: dict[str, list[_OpBytes]] = defaultdict(list)
    for node in nodes:
        if node.target not in of_complex or node in complex_ones:
            results = [_layout_of(value) for value in _values(node)]
            if isinstance(node.target, OpOverload):
                op_bytes = _OpBytes(results, scratch_bytes(node), viewed_arguments(node.target), node.name)
                calls[f"torch.ops.{node.target}"].append(op_bytes)
            else:  # one that saves a random state, or runs another from such a state
                op_bytes = _OpBytes(results, scratch_bytes(node), [None] * len(results), node.name)
                calls[f"torch.ops.higher_order.{node.target}"].append(op_bytes)
    return calls


def _touches_complex(node: fx.Node) -> bool:
    values = [value for touched in (node, *node.all_input_nodes) for value in _values(touched)]
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


def _values(node: fx.Node) -> list[object]:
    """Results of a node, one after the other where they are nested."""
    return tree_leaves(node.meta.get("val"))


def _layouts_of_inputs(graph: fx.Graph) -> dict[str, _Layout]:
    layouts = {str(node.target): _layout_of(node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"}
    return {name: layout for name, layout in layouts.items() if layout is not None}


def _layout_of(value: object) -> _Layout | None:
    if not isinstance(value, torch.Tensor):
        return None
    sizes, strides = ([size_expr(length) for length in lengths] for lengths in (value.shape, value.stride()))
    return _Layout(sizes, strides, value.dtype, value.device.type)


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
    layout: _Layout | None = None  # of an input or an op's result


class _Reader:
    """Walks the statements; knows which names hold which storages, and how they lie in them."""

    def __init__(
        self,
        lines: Sequence[str],
        ops: dict[str, list[_OpBytes]],
        layouts: dict[str, _Layout],
        inputs: CountedInputs,
        rows: dict[sympy.Symbol, sympy.Expr],
    ) -> None:
        self._lines, self._rows = lines, rows
        self._ops = {name: iter(calls) for name, calls in ops.items()}
        self._storages: list[_Storage] = []
        self._held: dict[str, list[_Storage]] = {}  # a name holds one storage, or all results of an op
        self._calls: list[Call] = []
        self._position = 0
        self._layouts = layouts
        for name, layout in layouts.items():
            if name in inputs.freed:
                self._hold(name, [self._new(name, layout.num_bytes, is_input=True, layout=layout)])
            if name in inputs.held:  # under no name of the wrapper, which can drop none of them
                self._new(name, layout.num_bytes, is_input=True)

    def read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self._assign(statement.targets[0].id, statement.value)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    self._drop(target.id)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._multiply(statement.value)
            self._record_origin(statement.value)
        self._position += 1

    def finish(self) -> GraphMemory:
        allocations = tuple(storage.allocation for storage in self._storages)
        return GraphMemory(allocations, tuple(self._calls), self._position)

    def _record_origin(self, call: ast.Call) -> None:
        """Record what made the buffers that a kernel is the first to get: the last node that it computes, or itself."""
        comment = _SOURCES.search(self._lines[call.lineno - 2])
        origin = comment[1].split(",")[-1].strip() if comment else ast.unparse(call.func).removesuffix(".run")
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            for part in ast.walk(argument):
                for storage in self._held.get(part.id, []) if isinstance(part, ast.Name) else []:
                    if not storage.allocation.origin and not storage.allocation.is_input:
                        storage.allocation = replace(storage.allocation, origin=origin)

    def _assign(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Name):
            self._hold(name, self._held.get(value.id, []))
            self._lay(name, self._layouts.get(value.id))
        elif isinstance(value, ast.Subscript):
            self._element(name, value)
        elif isinstance(value, ast.Call):
            self._call(name, value)

    def _element(self, name: str, element: ast.Subscript) -> None:
        """Bind a name to a result of an op: `buf[2]`, or `buf[1][0]` behind a random state that is first in `buf`."""
        places, source = [element.slice], element.value
        if isinstance(source, ast.Subscript):
            places, source = [source.slice, element.slice], source.value
        indices = [place.value for place in places if isinstance(place, ast.Constant) and isinstance(place.value, int)]
        storages = self._held.get(source.id, []) if isinstance(source, ast.Name) else []
        if len(indices) == len(places) and sum(indices) < len(storages):
            self._hold(name, [storages[sum(indices)]])
            self._lay(name, storages[sum(indices)].layout)

    def _call(self, name: str, call: ast.Call) -> None:
        function = _AS_OP.sub(r"torch.ops.aten.\1.default", ast.unparse(call.func))
        if function == "reinterpret_tensor":
            source = call.args[0]
            self._hold(name, self._held.get(source.id, []) if isinstance(source, ast.Name) else [])
            self._lay(name, self._layout(call))
        elif function.startswith("empty_strided_"):
            device_type = function.removeprefix("empty_strided_").removesuffix("_pinned").split("_")[0]
            layout = _requested(call, device_type)
            self._hold(name, [self._new(name, layout.num_bytes)])
            self._lay(name, layout)
        elif function.startswith("torch.ops.") and function in self._ops:
            label = function.removeprefix("torch.ops.")
            op = next(self._ops[function])
            viewed = self._viewed(call, op.views[0]) if len(op.views) == 1 else None
            if viewed is None:
                viewed = [self._result(label, op.node, result) for result in op.results]
            self._hold(name, viewed)
            self._lay(name, op.results[0] if len(op.results) == 1 else None)
            if function in _SAVING:
                self._mark_saved(self._held[name][1:], _texts(call))
            elif function in _FINDING:
                self._mark_saved(self._listed(call.args[_SAVED_ARGUMENT]), _texts(call))
            if _PHASES.get(function) == "backward":
                for place, storage in enumerate(self._held[name]):
                    storage.allocation = replace(storage.allocation, result_of=(_texts(call)[0], place))
            if op.scratch:
                self._hold_here(f"scratch of {label}", op.scratch)
            if function in _PHASES:
                self._calls.append(call_of(self._position, _PHASES[function], _texts(call)))
        elif (reduced := _reduced(call)) is not None:
            result, converted = reduced
            self._hold(name, [self._new(name, result)])
            if converted is not None:
                self._hold_here(f"sums of {name}", converted)
        elif name.startswith("buf"):
            raise _Unreadable(f"{name} = {function}(...)")

    def _multiply(self, call: ast.Call) -> None:
        """Record the scratch of a product of matrices: `extern_kernels.addmm(buf0, buf1, buf2, ..., out=buf3)`."""
        if ast.unparse(call.func) not in _PRODUCTS:
            return
        left, right = (self._layout(factor) for factor in call.args[-2:])
        if left is None or right is None:
            raise _Unreadable(ast.unparse(call))
        if left.device_type == "cpu" and left.dtype in _LOW_PRECISION:
            product = product_of(left.sizes, left.strides, right.sizes, right.strides, left.dtype)
            self._hold_here(f"scratch of {ast.unparse(call.func)}", product_scratch(product))

    def _layout(self, value: ast.expr) -> _Layout | None:
        """How a name, or a part of what it names, lies in memory; None where that is not known."""
        if isinstance(value, ast.Name):
            return self._layouts.get(value.id)
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "reinterpret_tensor":
            source, sizes, strides = value.args[:3]
            whole = self._layout(source)
            return None if whole is None else replace(whole, sizes=_sizes(sizes), strides=_sizes(strides))
        return None

    def _lay(self, name: str, layout: _Layout | None) -> None:
        if layout is None:
            self._layouts.pop(name, None)
        else:
            self._layouts[name] = layout

    def _result(self, name: str, node: str, layout: _Layout | None) -> _Storage:
        num_bytes = sympy.Integer(0) if layout is None else layout.num_bytes
        return self._new(name, num_bytes, layout=layout, origin=node)

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
        """Return the storages of the names in a list."""
        elements = names.elts if isinstance(names, ast.List) else []
        return [storage for name in elements if isinstance(name, ast.Name) for storage in self._held.get(name.id, [])]

    def _mark_saved(self, storages: Iterable[_Storage], texts: Sequence[str]) -> None:
        """Record which region saves these storages, with room for all rows."""
        for storage in storages:
            num_bytes = storage.allocation.num_bytes.subs(self._rows)
            storage.allocation = replace(storage.allocation, num_bytes=num_bytes, saved_by=texts[0])

    def _new(
        self,
        name: str,
        num_bytes: sympy.Expr,
        *,
        is_input: bool = False,
        layout: _Layout | None = None,
        origin: str = "",
    ) -> _Storage:
        allocation = Allocation(name, num_bytes, self._position, None, is_input, origin=origin)
        storage = _Storage(allocation, layout=layout)
        self._storages.append(storage)
        return storage

    def _hold_here(self, name: str, num_bytes: sympy.Expr) -> None:
        """Record an allocation that is alive only while the current statement runs."""
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


def _requested(call: ast.Call, device_type: str) -> _Layout:
    sizes, strides, dtype = call.args[:3]
    named = getattr(torch, ast.unparse(dtype).removeprefix("torch."))
    return _Layout(_sizes(sizes), _sizes(strides), named, device_type)


def _sizes(numbers: ast.expr) -> list[sympy.Expr]:
    if not isinstance(numbers, ast.Tuple):
        raise _Unreadable(ast.unparse(numbers))
    return [_sized(size) for size in numbers.elts]


def _reduced(call: ast.Call) -> tuple[sympy.Expr, sympy.Expr | None] | None:
    """The last step of a reduction that a CUDA kernel leaves to the wrapper, in parts that stand in a workspace:
    `workspace[start : stop].view(parts, n).sum(dim=0).view([...]).to(torch.bfloat16)`, of which the last two may miss.

    Returns:
        Bytes of what it leaves, and of the sums in fp32 that this was converted from, if it was; None for other calls.
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
    dtypes = [ast.unparse(method.args[0]).removeprefix("torch.") for name, method in methods if name == "to"]
    if not dtypes:
        return sums, None
    return _rounded(count * getattr(torch, dtypes[-1]).itemsize, "cuda"), sums


def _sized(node: ast.expr) -> sympy.Expr:
    """A size of the wrapper as an expression; its symbols are the graph's."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return sympy.Integer(node.value)
    if isinstance(node, ast.Name):
        return sympy.Symbol(node.id, positive=True, integer=True)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_sized(node.operand)
    if isinstance(node, ast.BinOp):
        operation = _OPERATIONS.get(type(node.op))
        if operation is not None:
            return operation(_sized(node.left), _sized(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
        function = sympy.Max if node.func.id == "max" else sympy.Min
        return function(*(_sized(argument) for argument in node.args))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in _ROUNDINGS and len(node.args) == 1:
        return _ROUNDINGS[ast.unparse(node.func)](_sized(node.args[0]))
    raise _Unreadable(ast.unparse(node))


def _texts(call: ast.Call) -> list[str]:
    return [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
