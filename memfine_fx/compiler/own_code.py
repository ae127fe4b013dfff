"""Compare chunked layers with the model's own code: the module as it is written, run eagerly on a few tokens.

Reading and the comparison of gradients both begin at a captured graph, so neither sees what was lost before the graph
existed. This comparison begins at the code. When a kind of layer is first chunked, the innermost module that holds its
router and its experts runs in two ways:

    eagerly, with nothing of memfine_fx installed        the code that the user wrote
    compiled alone, by the whole pipeline                captured, rewritten, read and lowered, in chunks of a few rows

Steps:
1. find the module of a region, and cut the arguments of the call that is being compiled to a few tokens;
2. run the model eagerly up to the module, which gives the module's own arguments;
3. compile the module alone, under the flags of this attempt;
4. run both, as routed and under each of `forced_choices.ROUTINGS`: outputs, arguments that are written in place,
   gradients, buffers, attributes of modules and what these hold, closures and globals, and random state must agree.

A layer that differs is refused; where a loop of its code was rewritten, that method is left as it is written instead.
A layer that cannot run so is chunked all the same, and the report says in its first lines that it was not compared.
Everything that these runs change is put back.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import hashlib
import logging
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from memfine_fx.capture.installing import uninstalled
from memfine_fx.capture.source.methods import rewritten_places
from memfine_fx.capture.undo import ModelState
from memfine_fx.compat.autograd import without_gradient_hooks, without_saved_tensor_hooks
from memfine_fx.compat.effects import PYTHON_EFFECTS, changed_objects, python_operator
from memfine_fx.compat.functional import Writes
from memfine_fx.compat.interpreter import CompiledCall, compiled_call
from memfine_fx.compat.tensors import is_quantized, tree_map
from memfine_fx.compat.transformers import without_recorder
from memfine_fx.compiler.captured_graph import LoweredRegion
from memfine_fx.compiler.logs import silenced
from memfine_fx.compiler.own_code_runs import (
    ALIKE,
    MOST_BYTES,
    TOLERANCES,
    Autocast,
    CannotCompare,
    CompileGraph,
    Given,
    ModuleReached,
    OtherLayer,
    PairOfRuns,
    all_tokens_of,
    autocast_states,
    few_tokens_of,
    frozen_if_large,
    in_double,
    num_bytes,
    stopping_at,
    tolerance_of,
)
from memfine_fx.compiler.session import Session
from memfine_fx.errors import GuardRefused, Reason
from memfine_fx.passes.dataflow import clean_module_path, node_value
from memfine_fx.passes.ops import CHOOSERS, SORTS, name_of, target_name
from memfine_fx.passes.verify.forced_choices import ROUTINGS
from memfine_fx.passes.verify.gradient_check import in_words
from memfine_fx.records import MoERegion, Refusal

__all__ = ["compare_with_own_code"]

log = logging.getLogger(__name__)
_PURE_OPERATORS = ("", "prims", "memfine", "transformers", "bitsandbytes")
"""Namespaces of operators in Python that change nothing but their results."""
_known: dict[str, _Verdict] = {}
_lock = threading.RLock()

Entry = tuple[str, type]
"""Path of a module as Dynamo has it, and the module's class."""


@dataclass(frozen=True)
class _Verdict:
    """Why a layer could not be compared, or how it differs; both "" where it agrees."""

    uncompared: str = ""
    difference: str = ""


def compare_with_own_code(
    graph: fx.Graph,
    outcomes: Sequence[LoweredRegion | Refusal],
    inputs: Sequence[object],
    session: Session,
    compile_graph: CompileGraph,
) -> list[LoweredRegion | Refusal]:
    """Compare the layers of one graph, each kind once a process.

    Args:
        graph: as captured; not changed.
        outcomes: its regions and refusals.
        inputs: of the graph in the call that is being compiled; () for the body of a higher-order operator.
        session: given the seconds as its stage "compare".
        compile_graph: compiles the captured graph of a layer alone.

    Returns:
        `outcomes` with a refusal in place of each region that differs.

    Raises:
        GuardRefused: a layer with a rewritten loop differs.
    """
    if not session.observer.compiles or not any(isinstance(outcome, LoweredRegion) for outcome in outcomes):
        return list(outcomes)
    with session.diagnostics.timed("compare"):
        result = list(outcomes)
        lowered = {place: outcome for place, outcome in enumerate(outcomes) if isinstance(outcome, LoweredRegion)}
        entries = {place: _entry_of(outcome.region) for place, outcome in lowered.items()}
        try:
            capture = _Capture(graph, inputs, compile_graph)
        except Exception as error:  # NOTE: what keeps a layer from being compared keeps it from nothing else
            unable = _Verdict(str(error) if isinstance(error, CannotCompare) else in_words(error))
            return [_judged(outcome, unable) if isinstance(outcome, LoweredRegion) else outcome for outcome in outcomes]
        for entry in dict.fromkeys(entries.values()):
            # A module may hold layers that are compared on their own.
            regions = [outcome.region for outcome in lowered.values() if _is_inside(outcome.region, entry)]
            verdict = _verdict(capture, entry, regions, session)
            for place in (place for place, own in entries.items() if own == entry):
                result[place] = _judged(lowered[place], verdict)
        return result


def _judged(outcome: LoweredRegion, verdict: _Verdict) -> LoweredRegion | Refusal:
    if not verdict.difference:
        return replace(outcome, not_compared_with_code=verdict.uncompared)
    details = f"in chunks it would differ from your code run eagerly: {verdict.difference}"
    return Refusal(outcome.region.where, Reason.OTHER_OUTPUT, details, str(outcome.region.cut.exit))


def _verdict(capture: _Capture, entry: Entry | None, regions: Sequence[MoERegion], session: Session) -> _Verdict:
    try:
        layer = capture.layer(entry, regions)
    except CannotCompare as error:
        return _Verdict(str(error))
    key = layer.kind(session)
    with _lock:
        if key not in _known:
            log.info("%s is compiled alone and compared with its own code", layer.name or type(layer.module).__name__)
            _known[key] = layer.verdict(session)
    verdict, rewritten = _known[key], rewritten_places(layer.module)
    if verdict.difference and rewritten:
        raise GuardRefused(
            f"with the rewritten loop it would differ from your code: {verdict.difference}", rewritten[0], layer.name
        )
    return verdict


# Which module holds a region.


def _entry_of(region: MoERegion) -> Entry | None:
    """The innermost module that holds a region's router and its experts; None for the one whose method is compiled."""
    choice = _choice_of(region)
    nodes = [*region.cut.nodes, *([] if choice is None else [choice])]
    stacks = [stack for node in nodes if (stack := _modules_around(node))]
    shared: Entry | None = None
    for entries in zip(*stacks, strict=False):
        if any(entry != entries[0] for entry in entries):
            break
        shared = entries[0]
    return shared


def _is_inside(region: MoERegion, entry: Entry | None) -> bool:
    return entry is None or all(entry in stack for node in region.cut.nodes if (stack := _modules_around(node)))


def _modules_around(node: fx.Node) -> list[Entry]:
    return [entry for entry in (node.meta.get("nn_module_stack") or {}).values() if isinstance(entry, tuple)]


def _choice_of(region: MoERegion) -> fx.Node | None:
    """The nearest node before the experts that chooses among scores."""
    read = [node for node in (region.expert_index, region.routing_weight, region.hidden) if node is not None]
    return next((node for node in _upwards(read) if name_of(node) in CHOOSERS | SORTS), None)


def _upwards(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield nodes and all that they are computed from, the nearest first."""
    level = list(dict.fromkeys(nodes))
    visited = set(level)
    while level:
        yield from level
        sources = dict.fromkeys(source for node in level for source in node.all_input_nodes)
        level = [source for source in sources if source not in visited]
        visited.update(level)


def _check_effects(graph: fx.Graph, changed: Iterable[object], state: ModelState) -> None:
    """Refuse code that runs must not repeat: what it changes is not put back.

    Args:
        graph: as captured.
        changed: the Python objects that the code changes.
        state: puts back what it holds.

    Raises:
        CannotCompare: `state` does not hold one of the objects, or the graph calls an operator that somebody wrote in
            Python, which may change anything.
    """
    for value in changed:
        if not state.holds(value):
            named = value if isinstance(value, str) else type(value).__name__
            raise CannotCompare(f"it changes {named}, which cannot be put back")
    for node in graph.nodes:
        operator = python_operator(node.target)
        if operator.partition("::")[0] not in _PURE_OPERATORS:
            raise CannotCompare(f"it calls {operator}, which may do anything")


class _Capture:
    """A graph and the call that is being compiled, searched once for all layers of the graph.

    Args:
        graph: as captured.
        inputs: of the graph in this call.
        compile_graph: compiles the captured graph of a layer alone.

    Raises:
        CannotCompare: nothing in this graph can be compared.
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[object], compile_graph: CompileGraph) -> None:
        if (
            torch.distributed.is_available()
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        ):
            raise CannotCompare("torch.distributed is in use")
        if not PYTHON_EFFECTS.holds():
            raise CannotCompare("Dynamo does not say which Python objects it changes")
        call = compiled_call()
        if call is None or call.model is None:
            raise CannotCompare("what is compiled is no module")
        if call.owner is None or not call.method:
            raise CannotCompare("what is compiled is no whole method: the graph breaks in front of it")
        self.call, self.model, self._changed = call, call.model, tuple(changed_objects())
        self._graph, self._compile_graph = graph, compile_graph
        self._modules = dict(call.owner.named_modules())
        self._names = {module: name for name, module in call.model.named_modules()}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._varies = any(isinstance(node_value(node), torch.SymInt) for node in placeholders)
        self._parameters = {
            node: id(value)
            for node, value in zip(placeholders, inputs, strict=False)
            if isinstance(value, torch.nn.Parameter)
        }

    @functools.cached_property
    def _nodes(self) -> dict[Entry | None, list[fx.Node]]:
        """The calls inside each module, those of the module whose method is compiled under None."""
        nodes: dict[Entry | None, list[fx.Node]] = {}
        for node in self._graph.nodes:
            if node.op != "placeholder":
                for entry in (None, *_modules_around(node)):
                    nodes.setdefault(entry, []).append(node)
        return nodes

    def layer(self, entry: Entry | None, regions: Sequence[MoERegion]) -> _Layer:
        """Return the module that holds regions.

        Args:
            entry: of the module, see `_entry_of`.
            regions: all that it holds.

        Raises:
            CannotCompare: no module has all parameters of the regions.
        """
        path = "" if entry is None else clean_module_path(entry[0])
        module = self._modules.get(path)
        read = _upwards(node for region in regions for node in region.params)
        parameters = {self._parameters[node] for node in read if node in self._parameters}
        if (
            module is None
            or (entry and type(module) is not entry[1])
            or parameters - {id(parameter) for parameter in module.parameters()}
        ):
            raise CannotCompare("no module holds both its router and its experts")
        name = self._names.get(module, path)
        nodes = tuple(self._nodes.get(entry, ()))
        return _Layer(
            module, name, self.model, self.call, self._changed, nodes, tuple(regions), self._varies, self._compile_graph
        )


@dataclass(frozen=True)
class _Layer:
    """A module that holds chunked regions, in the call that is being compiled.

    Args:
        module: itself.
        name: its path in the model, "" for the model.
        model: whose call is being compiled.
        call: that call.
        changed: Python objects of the user's that the compiled code changes.
        nodes: the module's nodes in the graph, without inputs of the graph.
        regions: the regions among them.
        varies: whether sizes of the graph's inputs vary.
        compile_graph: compiles the captured graph of the module alone.
    """

    module: torch.nn.Module
    name: str
    model: torch.nn.Module
    call: CompiledCall
    changed: tuple[object, ...]
    nodes: tuple[fx.Node, ...]
    regions: tuple[MoERegion, ...]
    varies: bool
    compile_graph: CompileGraph

    def kind(self, session: Session) -> str:
        """Equal for layers of which one comparison is enough."""
        module = self.module
        names: dict[object, str] = {}
        calls = []
        for node in self.nodes:
            value = node_value(node)
            # A size that several layers read is computed in the first of them alone. Assertions name symbols.
            is_size = isinstance(value, torch.SymInt) and not any(map(_is_tensor, node.all_input_nodes))
            if not is_size and "assert" not in target_name(node):
                operands = fx.map_arg((node.args, node.kwargs), functools.partial(_description, names))
                calls.append(f"{node.op} {node.target if node.op.startswith('call') else ''} {operands}")
                names[node] = f"%{len(calls)}"
        switches = [
            (name, key, value)
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, (bool, str, float)) or value is None
        ]
        parameters = [(own.shape, own.dtype, own.requires_grad) for own in module.parameters()]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_states()
        text = (type(module), calls, switches, parameters, modes, session.config.axis, rewritten_places(module))
        return hashlib.sha256(repr(text).encode()).hexdigest()

    @property
    def tolerance(self) -> float:
        """Largest difference that rounding explains, relative to a tensor's norm."""
        values = [*map(node_value, self.nodes), *self.module.parameters(), *self.module.buffers()]
        return tolerance_of(value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point())

    def verdict(self, session: Session) -> _Verdict:
        """Run the module in both ways and compare."""
        before = ModelState(self.model, objects=self.changed)
        try:
            _check_effects(self.nodes[0].graph, self.changed, before)
            return self._compared(session)
        except CannotCompare as error:
            return _Verdict(str(error))
        except Exception as error:  # NOTE: the model's own code may raise anything
            return _Verdict(in_words(error))
        finally:
            before.restore()

    def _compared(self, session: Session) -> _Verdict:
        if any(
            tensor.is_meta or is_quantized(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())
        ):
            raise CannotCompare("its tensors are quantized or hold no data")
        # Hooks of the user's, and checkpoints, count what a step saves and which gradients it gives.
        hookless = without_saved_tensor_hooks(), without_gradient_hooks(self.module.parameters())
        with warnings.catch_warnings(), silenced(), hookless[0], hookless[1]:
            warnings.simplefilter("ignore")
            verdict = _Verdict("its sizes are too large")
            for arguments, autocasts in self._arguments():
                verdict = self._compared_on(arguments, autocasts, session)
                if not verdict.uncompared:
                    break
        return verdict

    def _compared_on(self, given: Given, autocasts: Sequence[Autocast], session: Session) -> _Verdict:
        with contextlib.ExitStack() as stack:
            stack.enter_context(frozen_if_large(self.module))
            stack.enter_context(without_recorder())
            for autocast in autocasts:
                stack.enter_context(torch.autocast(*autocast))
            try:
                pair = self._pair(self.module, given, session, self.tolerance)
                pair.compile(len(self.regions), self.varies)
                for routing in ("", *ROUTINGS, ALIKE):
                    difference = pair.difference(routing, self.regions[0].dims.num_experts)
                    if difference and not self._agrees_in_double(given, session, routing):
                        return _Verdict(difference=f"{difference}, routing: {routing or 'as it is'}")
            except OtherLayer:
                raise
            except CannotCompare as error:
                return _Verdict(str(error))
        return _Verdict()

    def _pair(self, module: torch.nn.Module, given: Given, session: Session, tolerance: float) -> PairOfRuns:
        return PairOfRuns(module, given, self.changed, session, tolerance, self.compile_graph)

    def _agrees_in_double(self, given: Given, session: Session, routing: str) -> bool:
        """Whether a difference in fp32 is rounding: a copy of the module in fp64 has none."""
        if self.tolerance != TOLERANCES[torch.float32] or num_bytes(self.module.parameters()) > MOST_BYTES:
            return False
        try:
            doubled = copy.deepcopy(self.module).double()
            pair = self._pair(doubled, tree_map(in_double, given), session, TOLERANCES[torch.float64])
            pair.compile(len(self.regions), self.varies)
            return not pair.difference(routing, self.regions[0].dims.num_experts)
        except Exception:  # NOTE: a module may neither be copied nor run in fp64; the difference stands then
            return False

    def _arguments(self) -> Iterator[tuple[Given, list[Autocast]]]:
        """The module's own arguments and the autocasts in which it is called: for a few tokens, then for all.

        Raises:
            CannotCompare: the method that is compiled does not come to the module.
        """
        owner, method, own = self.call.owner, self.call.method, (self.call.args, self.call.kwargs)
        if self.module is owner:
            if method != "forward":
                raise CannotCompare(f"its method {method} is compiled")
            yield from ((arguments, autocast_states()) for arguments in (*few_tokens_of(own), *all_tokens_of(own)))
            return
        reason = ""
        for args, kwargs in (*few_tokens_of(own), *all_tokens_of(own)):
            try:
                reached = self._reached(args, kwargs)
            except Exception as error:  # NOTE: a model may need other numbers of tokens than these
                reason = in_words(error)
            else:
                for arguments in (next(few_tokens_of(reached.given)), *all_tokens_of(reached.given)):
                    yield arguments, reached.autocasts
        if reason:
            raise CannotCompare(f"the model does not run on a few tokens: {reason}")

    def _reached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleReached:
        """Run the method that is compiled up to the module's call."""
        writes = Writes()
        try:
            with uninstalled(), stopping_at(self.module), torch.no_grad(), writes:
                method = getattr(self.call.owner, self.call.method)
                contextvars.copy_context().run(method, *args, **kwargs)  # the end comes before any variable is reset
        except ModuleReached as reached:
            return reached
        finally:
            writes.restore()
        raise CannotCompare("the model does not call it")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node_value(node), Tensor)


def _description(names: dict[object, str], node: fx.Node) -> str:
    """Describe an operand of a module's call, alike in all layers of one kind.

    Args:
        names: of the module's calls so far and of the symbols in its sizes, which are named in order.

    Returns:
        The call's name; of a value that comes from outside dtype, dimensions, gradient and class, no sizes.
    """
    value = node_value(node)
    if isinstance(value, torch.SymInt):
        expr = value.node.expr
        return str(expr.xreplace({symbol: _renamed(symbol, names) for symbol in sorted(expr.free_symbols, key=str)}))
    if isinstance(value, Tensor):
        return names.get(node) or f"<{value.dtype} {value.ndim} {value.requires_grad} {type(value).__name__}>"
    return names.get(node) or f"<{type(value).__name__}>"


def _renamed(symbol: sympy.Symbol, names: dict[object, str]) -> sympy.Symbol:
    return sympy.Symbol(names.setdefault(symbol, f"n{len(names)}"))
