"""Walks on record: what the reader says of every call of a small function, beside what the call gives on numbers.

A function is recorded as Dynamo would record it, with fake tensors. The real reader walks it; every call that it heard
is kept with the values of its arguments and results. Then the same nodes run as functional ATen on numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.errors import CannotChunk
from memfine_fx.passes.dataflow import Dataflow, written_node
from memfine_fx.passes.modes import Modes, modes_at
from memfine_fx.passes.ops import target_name
from memfine_fx.passes.read.expressions import Param, RowsDiffer
from memfine_fx.passes.read.frame import Exit, Frame
from memfine_fx.passes.read.normal_form import Call, NormalForm
from memfine_fx.passes.read.reader import Reader
from memfine_fx.passes.read.regions import _between
from memfine_fx.passes.read.rules import rule_of
from tests.passes.read.claims import Claims, numbers_of
from tests.passes.read.routings import NUM_EXPERTS, Routing, inputs_of

__all__ = ["Heard", "Layer", "Walk", "walk"]

T = TypeVar("T")
_CALLS_ONE_HOT_OTHERWISE = torch.__version__.startswith("2.11.")
"""It compares fake ids with a range, and scatters ones by numbers."""
Layer = Callable[[Any], Any]
"""A function of the tensors that `routings.inputs_of` names, as attributes."""


@dataclass(frozen=True)
class Heard:
    """One call: the values of its arguments and results, what it gave on numbers, and what was unified by then."""

    call: Call
    operands: list[Any]
    results: list[Any]
    params: dict[fx.Node, Param]
    columns: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Walk:
    """All that was heard, call by call, and the same on numbers; the exit, or why the walk stopped."""

    routing: Routing
    calls: list[tuple[Heard, Call]]
    outer: dict[fx.Node, Any]
    reader: Reader
    exit: Exit | None
    refusal: CannotChunk | None

    def claims_at(self, heard: Heard) -> Claims:
        return Claims(self.routing, self.outer, heard.params, heard.columns)

    def check_exit(self) -> None:
        """Compare what the exit claims with the numbers of its node."""
        assert self.exit is not None, self.refusal or self.reader.refusals
        claims = Claims(self.routing, self.outer, self.reader.expressions.params, self.reader.expressions.columns)
        numbers = self.outer[written_node(self.exit.node)]
        assert isinstance(numbers, Tensor)
        _compare(self.exit.value, numbers, claims, f"the exit {self.exit.node}", "is")

    def check(self, heard: Heard, numbers: Call) -> int:
        """Compare every claim about a call with the numbers; how many numbers were claimed of its results."""
        claims = self.claims_at(heard)
        sides = (heard.call.args, heard.call.kwargs), (numbers.args, numbers.kwargs)
        for value, tensor in zip(heard.operands, _tensors(sides[1]), strict=True):
            _compare(value, tensor, claims, heard.call.target, "is given")
        return sum(
            _compare(value, tensor, claims, heard.call.target, "gives")
            for value, tensor in zip(heard.results, _tensors(numbers.out), strict=True)
        )


def _compare(value: Any, tensor: Tensor, claims: Claims, what: object, verb: str) -> int:
    claimed = numbers_of(value, tensor.shape, claims)
    is_claimed, numbers = ~claimed.isnan(), tensor.detach().to(torch.float64)
    message = f"{what} {verb} {value}: claimed {claimed.tolist()}, is {numbers.tolist()}"
    tolerance = 1e-5 if tensor.dtype is torch.float32 else 1e-10
    assert torch.allclose(claimed[is_claimed], numbers[is_claimed], rtol=tolerance, atol=tolerance), message
    return int(is_claimed.sum())


def walk(layer: Layer, routing: Routing) -> Walk:
    """Read a layer on fake tensors, then run what was read on numbers."""
    inputs = inputs_of(routing)
    graph = _recorded(layer, inputs)
    values = dict(zip(graph.find_nodes(op="placeholder"), tree_leaves(list(inputs.values())), strict=True))
    _record_fakes(graph, values, routing)
    reader, found, refusal = _read(graph, routing)
    outer = _record_numbers(graph, values)
    heard, numbers = reader.heard, _told_on_numbers(graph, list(reader.ran))
    if _CALLS_ONE_HOT_OTHERWISE:
        heard, numbers = _last_of_one_hot(heard, lambda one: one.call), _last_of_one_hot(numbers, lambda one: one)
    pairs = _paired(heard, numbers)
    return Walk(routing, pairs, outer, reader, found, refusal)


def _paired(heard: list[Heard], numbers: list[Call]) -> list[tuple[Heard, Call]]:
    """Each call that was heard with the same on numbers, where no slice that takes all is written."""
    pairs: list[tuple[Heard, Call]] = []
    for one in heard:
        other = numbers[len(pairs)]
        is_one_hot = _CALLS_ONE_HOT_OTHERWISE and target_name(other.node) == "one_hot"
        if one.call.node is other.node and (one.call.target is other.target or is_one_hot):
            results_alone = replace(one, operands=[]), Call(other.target, (), {}, other.out, other.node)
            pairs.append(results_alone if is_one_hot else (one, other))
        else:
            assert one.call.target is torch.ops.aten.slice.Tensor, f"{one.call.target}, on numbers {other.target}"
    return pairs


def _last_of_one_hot(calls: list[T], call_of: Callable[[T], Call]) -> list[T]:
    """Of one_hot's calls the last, whose result alone is alike."""
    nodes = [call_of(one).node for one in calls]
    is_inner = [target_name(node) == "one_hot" and node in nodes[at + 1 :] for at, node in enumerate(nodes)]
    return [one for one, inner in zip(calls, is_inner, strict=True) if not inner]


def _read(graph: fx.Graph, routing: Routing) -> tuple[_Recorder, Exit | None, CannotChunk | None]:
    """A reading; once more with results of experts that were taken for tokens as part of the region."""
    forced: frozenset[fx.Node] = frozenset()
    for _ in range(3):
        reader = _Recorder(graph, _frame(graph, routing), forced)
        try:
            return reader, reader.read(set()), None
        except RowsDiffer as differ:
            refusal: CannotChunk = differ
            forced |= _between(reader.flow, differ.leaves)
        except CannotChunk as stopped:
            return reader, None, stopped
    return reader, None, refusal


def _recorded(layer: Layer, inputs: dict[str, Any]) -> fx.Graph:
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def proxy(name: str) -> fx.Proxy:
        return fx.Proxy(graph.placeholder(name), tracer)

    named = {
        name: [proxy(f"{name}_{place}") for place in range(len(value))] if isinstance(value, list) else proxy(name)
        for name, value in inputs.items()
    }
    result = layer(SimpleNamespace(**named, pieces={}))
    graph.output(fx.node.map_aggregate(result, lambda one: one.node if isinstance(one, fx.Proxy) else one))
    return graph


def _frame(graph: fx.Graph, routing: Routing) -> Frame:
    index = next(iter(graph.nodes))
    shape = index.meta["example_value"].shape
    return Frame(
        index=index,
        token_shape=tuple(shape[: len(routing.token_shape)]),
        top_k=routing.top_k,
        has_choices=routing.has_choices,
        is_distinct=routing.is_distinct,
        num_experts=NUM_EXPERTS if routing.is_distinct else None,
        bound=NUM_EXPERTS if routing.is_distinct else None,
    )


class _Recorder(Reader):
    """A reader that keeps what it heard."""

    def __init__(self, graph: fx.Graph, frame: Frame, forced: frozenset[fx.Node]) -> None:
        super().__init__(Dataflow(graph), modes_at(graph, Modes()), frame, rule_of, forced)
        self.heard: list[Heard] = []

    def _notice_call(self, call: Call) -> None:
        operands = self._values_of((call.args, call.kwargs))
        super()._notice_call(call)
        results = self._values_of(call.out)
        self.heard.append(Heard(call, operands, results, dict(self.expressions.params), self.expressions.columns))

    def _values_of(self, result: Any) -> list[Any]:
        return [self._value_of(tensor, None) for tensor in _tensors(result)]


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _record_fakes(graph: fx.Graph, values: dict[fx.Node, Tensor], routing: Routing) -> None:
    shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    mode = FakeTensorMode(shape_env=shape_env)
    symbols: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Any:
        is_tokens = routing.is_dynamic and not isinstance(tensor, torch.nn.Parameter)
        dims = [DimDynamic.DYNAMIC if is_tokens and dim == 0 else DimDynamic.STATIC for dim in range(tensor.ndim)]
        made = mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))
        if not is_tokens:
            return made
        size = symbols.setdefault(0, made.shape[0])
        with mode:
            return torch.empty(size, *made.shape[1:], dtype=tensor.dtype)

    fakes = {node: fake(value) for node, value in values.items()}
    with torch.no_grad(), mode, shape_env.ignore_fresh_unbacked_symbols():
        _Recording(graph, fakes).run()


def _record_numbers(graph: fx.Graph, values: dict[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    with torch.no_grad():
        _Recording(graph, values).run()
    return {node: node.meta["example_value"] for node in graph.nodes if "example_value" in node.meta}


class _Recording:
    """Runs a graph; each node's meta keeps what it gave, numbers as they were at the time."""

    def __init__(self, graph: fx.Graph, values: dict[fx.Node, Tensor]) -> None:
        self._graph, self._values = graph, values

    def run(self) -> None:
        env: dict[fx.Node, Any] = {node: value for node, value in self._values.items()}
        for node in self._graph.nodes:
            if node.op == "output":
                return
            if node not in env:
                env[node] = self._called(node, *fx.map_arg((node.args, node.kwargs), env.__getitem__))
            is_number = isinstance(env[node], Tensor) and not isinstance(env[node], FakeTensor)
            node.meta["example_value"] = env[node].clone() if is_number else env[node]

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]  # a function


def _told_on_numbers(graph: fx.Graph, nodes: list[fx.Node]) -> list[Call]:
    told: list[Call] = []
    form = NormalForm(graph, modes_at(graph, Modes()), told.append)

    def run() -> None:
        for node in nodes:
            form.run(node)

    form.reading(run)
    return told
