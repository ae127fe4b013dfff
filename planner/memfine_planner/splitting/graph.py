"""Where a model may be cut in two, read from its traced graph.

A cut is one tensor through which everything flows from the model's input to its output: the node dominates the output
in the graph of data dependencies (parameters and constants are no sources, either side may hold them). Layer names play
no part, so residual branches, towers and functional code are cut where their graph allows it.

    trace -> Traced        the graph of torch.export, with the example's shapes
    find_cuts -> Cut, ...  every cut, from "all offloaded" (the input itself) to "all local" (the output)
    split -> Halves        the two modules of a cut, holding the model's own parameters
    load_model             the model of a user's file, with an example batch

A cut is left out where a parameter is used on both sides (it could not be trained on one), and where the tensor is no
float (no gradient could come back). Of cuts with the same device-side work and parameters the one that sends least is
kept, the last of equals.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils.flop_counter import FlopCounterMode

from memfine_fx.compat.dynamo import compile_failures
from memfine_fx.compat.operators import OpOverload, schema_arguments
from memfine_fx.compat.tensors import FakeTensor, tree_leaves
from memfine_fx.errors import ConfigError

__all__ = ["Cut", "Halves", "Traced", "find_cuts", "load_model", "split", "trace"]


@dataclass(frozen=True)
class Cut:
    """One place to cut; figures of the forward pass, per sample, parameters in all.

    Args:
        node: name of the graph node whose value is sent.
        place: the module that computes it, for people.
        device_flops, server_flops: forward FLOPs of the two sides.
        activation_bytes: what is sent up; 0 where all is local.
        gradient_bytes: what comes back; the input itself needs no gradient.
        device_parameter_bytes: what the device trains.
    """

    node: str
    place: str
    device_flops: float
    server_flops: float
    activation_bytes: float
    gradient_bytes: float
    device_parameter_bytes: int


@dataclass(frozen=True)
class Halves:
    """The two modules of a cut; `server` is None where all is local, `device` where all is offloaded."""

    device: GraphModule | None
    server: GraphModule | None


@dataclass(frozen=True)
class Traced:
    """A model's graph with one input and one output, both with the batch as their first dimension."""

    module: GraphModule
    batch: int

    @cached_property
    def input(self) -> Node:
        found: Node = self.module.graph.find_nodes(op="placeholder")[0]
        return found

    @cached_property
    def output(self) -> Node:
        return _result(self.module.graph)

    @cached_property
    def downstream(self) -> frozenset[Node]:
        """Nodes that depend on the input."""
        found = {self.input}
        for node in self.module.graph.nodes:
            if any(source in found for source in node.all_input_nodes):
                found.add(node)
        return frozenset(found)


def load_model(target: str) -> tuple[nn.Module, Tensor]:
    """A model with an example batch, which the factory of "path/to/file.py:factory" returns.

    Raises:
        ConfigError: there is no such model, or the factory returns something else.
    """
    path, _, name = target.rpartition(":")
    if not path.endswith(".py") or not Path(path).exists():
        raise ConfigError(f"--model {target!r}: expected an existing path/to/file.py:factory")
    spec = importlib.util.spec_from_file_location("memfine_split_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(f"--model {target!r}: {path} has no callable {name!r}")
    made = factory()
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and isinstance(made[1], Tensor)
    ):
        raise ConfigError(
            f"--model {target!r}: {name} returned {type(made).__name__}; expected (module, example tensor)"
        )
    return made[0], made[1]


def trace(model: nn.Module, example: Tensor) -> Traced:
    """The graph of `model(example)`; the example's first dimension is the batch.

    Raises:
        ConfigError: the example has no batch, torch.export cannot trace the model, or its output is no single tensor.
    """
    if not example.ndim or not len(example):
        raise ConfigError(f"the example has the shape {list(example.shape)}; expected a batch as its first dimension")
    # What a model with another number of arguments raises is a TypeError.
    failures: tuple[type[Exception], ...] = (RuntimeError, TypeError, *compile_failures())
    try:
        with _quiet():
            # Functional form: what an operator in place changes is data flow only there.
            exported = torch.export.export(model, (example,)).run_decompositions({})
            module = exported.module(check_guards=False)
    except failures as error:
        text = str(error).strip().splitlines()
        raise ConfigError(f"torch.export cannot trace {type(model).__name__}: {text[0] if text else error}") from error
    assert isinstance(module, GraphModule)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise ConfigError(f"{type(model).__name__} takes {len(inputs)} tensors; expected one")
    _result(module.graph)
    return Traced(module, example.shape[0])


def find_cuts(traced: Traced) -> tuple[Cut, ...]:
    """Every usable cut, from the input to the output."""
    flops = {node: _flops(node) for node in traced.downstream}
    total = sum(flops.values())
    found: list[Cut] = []
    for node in _dominators(traced):
        is_input, is_output = node is traced.input, node is traced.output
        if not (is_input or is_output) and not _is_float_tensor(node):
            continue
        before = _ancestors([node])
        after = _ancestors([traced.output], stop=node) - {node}
        ours = _parameters(traced, before)
        if ours.keys() & _parameters(traced, after).keys() and not is_output:
            continue
        device = sum(flops[one] for one in before & traced.downstream)
        value = node.meta["val"]
        sent = 0.0 if is_output else value.numel() * value.element_size() / traced.batch
        returned = 0.0 if is_input else sent
        work = (device / traced.batch, (total - device) / traced.batch)
        found.append(Cut(node.name, _place(node), *work, sent, returned, sum(ours.values())))
    return tuple(_least_sent(found))


def split(traced: Traced, cut: Cut, *, copied: bool = False) -> Halves:
    """The two halves; their parameters are the model's own tensors (or copies), under the model's names."""
    if copied:
        with _quiet():
            return deepcopy(split(traced, cut))
    node = next((one for one in traced.module.graph.nodes if one.name == cut.node), None)
    if node is None:
        raise ConfigError(f"the graph has no node {cut.node!r}; expected one of find_cuts")
    if node is traced.input:
        return Halves(None, traced.module)
    if node is traced.output:
        return Halves(traced.module, None)
    device = _slice(traced, [node], None)
    server = _slice(traced, [traced.output], node)
    return Halves(device, server)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning of copying its own tree specifications in a spelling that it deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        yield


def _result(graph: Graph) -> Node:
    """The single tensor that the graph returns."""
    returned = next(node for node in reversed(graph.nodes) if node.op == "output").args[0]
    flat = [one for one in tree_leaves(returned) if one is not None]
    if len(flat) == 1 and isinstance(flat[0], Node):
        return flat[0]
    got = f"{len(flat)} values" if len(flat) != 1 else f"the constant {flat[0]!r}"
    raise ConfigError(f"the model returns {got}; expected one tensor (wrap it to return the logits)")


def _dominators(traced: Traced) -> list[Node]:
    """The nodes that every path from input to output passes, in order."""
    graph: nx.DiGraph[Node] = nx.DiGraph()
    graph.add_node(traced.input)
    for node in traced.downstream:
        graph.add_edges_from((source, node) for source in node.all_input_nodes if source in traced.downstream)
    if traced.output not in traced.downstream:
        raise ConfigError("the model's output does not depend on its input")
    immediate = nx.immediate_dominators(graph, traced.input)
    chain = [traced.output]
    while chain[-1] is not traced.input:
        chain.append(immediate[chain[-1]])
    return chain[::-1]


def _ancestors(nodes: Iterable[Node], stop: Node | None = None) -> set[Node]:
    """The nodes with all that they are computed from, not going beyond `stop`."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if node is not stop:
            pending.extend(node.all_input_nodes)
    return found


def _parameters(traced: Traced, nodes: Iterable[Node]) -> dict[int, int]:
    """Bytes of the parameters among the nodes, by identity of the tensor."""
    tensors = (_attribute(traced.module, node) for node in nodes if node.op == "get_attr")
    return {id(one): one.numel() * one.element_size() for one in tensors if isinstance(one, nn.Parameter)}


def _attribute(module: nn.Module, node: Node) -> object:
    found: object = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def _is_float_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _flops(node: Node) -> float:
    """FLOPs of the node's operator on the example's shapes, as torch counts them."""
    if node.op != "call_function" or not callable(node.target):
        return 0.0
    values = [one.meta.get("val") for one in node.all_input_nodes]
    fake = next((one.fake_mode for one in values if isinstance(one, FakeTensor)), None)
    if fake is None:
        return 0.0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    with fake, torch.no_grad(), FlopCounterMode(display=False) as counter:
        node.target(*args, **kwargs)
    return float(counter.get_total_flops())


def _place(node: Node) -> str:
    """The innermost module that computes the node."""
    if node.op == "placeholder":
        return "input"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    operator = getattr(node.target, "overloadpacket", node.target)
    return f"{path or 'model'} ({getattr(operator, '__name__', operator)})"


def _least_sent(cuts: Sequence[Cut]) -> list[Cut]:
    """Of neighbours with the same work and parameters, the one that sends least, the last of equals."""
    kept: list[Cut] = []
    for cut in cuts:
        # The output is a plan of its own (nothing is sent); it may cost no more work than the cut before it.
        if kept and cut.activation_bytes and _work(kept[-1]) == _work(cut) and kept[-1].place != "input":
            if cut.activation_bytes <= kept[-1].activation_bytes:
                kept[-1] = cut
            continue
        kept.append(cut)
    return kept


def _work(cut: Cut) -> tuple[float, int]:
    return cut.device_flops, cut.device_parameter_bytes


def _slice(traced: Traced, results: list[Node], stop: Node | None) -> GraphModule:
    """The part of the graph that computes the results from the input, or from `stop` where it is given."""
    wanted = _ancestors(results, stop)
    nodes = list(traced.module.graph.nodes)
    owners = _owners(wanted)
    # A new running mean is written back by a copy without users; it belongs to the half whose module keeps it.
    for node in (one for one in nodes if _writes_state(one)):
        needed = _ancestors([node], stop)
        if needed & traced.downstream <= wanted | {node} and _owners(needed) & owners:
            wanted |= needed
    graph = Graph()
    copied: dict[Node, Node] = {}
    if stop is not None:
        copied[stop] = graph.placeholder(stop.name)
    for node in nodes:
        if node in wanted and node is not stop:
            copied[node] = graph.node_copy(node, lambda one: copied[one])
    graph.output(copied[results[0]])
    graph.lint()
    return GraphModule(traced.module, graph)


def _owners(nodes: Iterable[Node]) -> set[str]:
    """Paths of the modules whose parameters and buffers are among the nodes."""
    return {str(node.target).rpartition(".")[0] for node in nodes if node.op == "get_attr"}


def _writes_state(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.users:
        return False
    return any(one.alias_info is not None and one.alias_info.is_write for one in schema_arguments(node.target))
