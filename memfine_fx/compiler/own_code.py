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
import itertools
import logging
import math
import random
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from memfine_fx.capture.installing import uninstalled
from memfine_fx.capture.source.methods import rewritten_places
from memfine_fx.capture.undo import Generators, ModelState, functions_of, named_globals
from memfine_fx.compat.autograd import without_gradient_hooks, without_saved_tensor_hooks
from memfine_fx.compat.effects import PYTHON_EFFECTS, changed_objects, python_operator
from memfine_fx.compat.functional import Writes
from memfine_fx.compat.interpreter import CompiledCall, compiled_call
from memfine_fx.compat.nn import own_buffers, plain_call
from memfine_fx.compat.tensors import is_quantized, tree_leaves, tree_map
from memfine_fx.compat.transformers import without_recorder
from memfine_fx.compiler.captured_graph import LoweredRegion
from memfine_fx.compiler.observer import Observer
from memfine_fx.compiler.session import Session
from memfine_fx.compiler.telling import silenced
from memfine_fx.errors import GuardRefused, Reason
from memfine_fx.passes.dataflow import clean_module_path, node_value
from memfine_fx.passes.ops import CHOOSERS, SORTS, name_of, target_name
from memfine_fx.passes.verify.forced_choices import ROUTINGS, ForcedChoices
from memfine_fx.passes.verify.gradient_check import in_words
from memfine_fx.records import MoERegion, Refusal

__all__ = ["compare_with_own_code"]

log = logging.getLogger(__name__)
_FEW_TOKENS, _MOST_TOKENS = 7, 64
"""Seven, because where sizes do not vary a number of tokens must not look like one of experts."""
_ROWS_PER_CHUNK = 5
_MOST_BYTES = 64 << 20
"""Of all parameters whose gradients are compared, the smallest first. Larger tables count as frozen here;
`passes.verify.gradient_check` compares their gradients, with narrow widths."""
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Relative to the norm, by the coarsest dtype in which the module computes."""
_COARSE = 0.1
"""Where it computes in a dtype of 8 bits."""
_LEAST_SHARE = 1e-3
"""Of the largest gradient: what is smaller is compared with this."""
_HIDDEN_ATTRIBUTES = frozenset(("training", "T_destination", "call_super_init", "dump_patches"))
_ALIKE = "tokens alike"
"""Routing where all tokens are the first one, which no choice needs to be forced for."""
_PLAIN = (int, float, str, frozenset, list, dict)
_PURE_OPERATORS = ("", "prims", "memfine", "transformers", "bitsandbytes")
"""Namespaces of operators in Python that change nothing but their results."""
_known: dict[str, _Verdict] = {}
_lock = threading.RLock()

Entry = tuple[str, type]
"""Path of a module as Dynamo has it, and the module's class."""
Results = dict[str, Any]
Autocast = tuple[str, torch.dtype, bool]
"""Arguments of `torch.autocast`: device, dtype, whether it is on."""
Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, by position and by name."""
CompileGraph = Callable[[fx.GraphModule, Sequence[Any], Session], Callable[..., Any]]
"""`pipeline.compile_graph`, which calls this module and so is handed to it."""


@dataclass(frozen=True)
class _Verdict:
    """Why a layer could not be compared, or how it differs; both "" where it agrees."""

    uncompared: str = ""
    difference: str = ""


class _CannotCompare(Exception):
    """A layer cannot run on its own; the message says why."""


class _OtherLayer(_CannotCompare):
    """Compiled alone, a layer has other regions, whatever its arguments are."""


class _Reached(BaseException):
    """The module was called, with these arguments. No handler of the model's own code catches it."""

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.given, self.autocasts = given, _autocasts()


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
    is_off = session.config.gives_up_comparison_with_eager or not session.observer.compiles
    if is_off or not any(isinstance(outcome, LoweredRegion) for outcome in outcomes):
        return list(outcomes)
    with session.diagnostics.timed("compare"):
        result = list(outcomes)
        lowered = {place: outcome for place, outcome in enumerate(outcomes) if isinstance(outcome, LoweredRegion)}
        entries = {place: _entry_of(outcome.region) for place, outcome in lowered.items()}
        try:
            capture = _Capture(graph, inputs, compile_graph)
        except Exception as error:  # NOTE: what keeps a layer from being compared keeps it from nothing else
            unable = _Verdict(str(error) if isinstance(error, _CannotCompare) else in_words(error))
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
    except _CannotCompare as error:
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
        _CannotCompare: `state` does not hold one of the objects, or the graph calls an operator that somebody wrote in
            Python, which may change anything.
    """
    for value in changed:
        if not state.holds(value):
            named = value if isinstance(value, str) else type(value).__name__
            raise _CannotCompare(f"it changes {named}, which cannot be put back")
    for node in graph.nodes:
        operator = python_operator(node.target)
        if operator.partition("::")[0] not in _PURE_OPERATORS:
            raise _CannotCompare(f"it calls {operator}, which may do anything")


class _Capture:
    """A graph and the call that is being compiled, searched once for all layers of the graph.

    Args:
        graph: as captured.
        inputs: of the graph in this call.
        compile_graph: compiles the captured graph of a layer alone.

    Raises:
        _CannotCompare: nothing in this graph can be compared.
    """

    def __init__(self, graph: fx.Graph, inputs: Sequence[object], compile_graph: CompileGraph) -> None:
        if (
            torch.distributed.is_available()
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        ):
            raise _CannotCompare("torch.distributed is in use")
        if not PYTHON_EFFECTS.holds():
            raise _CannotCompare("Dynamo does not say which Python objects it changes")
        call = compiled_call()
        if call is None or call.model is None:
            raise _CannotCompare("what is compiled is no module")
        if call.owner is None or not call.method:
            raise _CannotCompare("what is compiled is no whole method: the graph breaks in front of it")
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
            _CannotCompare: no module has all parameters of the regions.
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
            raise _CannotCompare("no module holds both its router and its experts")
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
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocasts()
        text = (type(module), calls, switches, parameters, modes, session.config.axis, rewritten_places(module))
        return hashlib.sha256(repr(text).encode()).hexdigest()

    @property
    def tolerance(self) -> float:
        """Largest difference that rounding explains, relative to a tensor's norm."""
        values = [*map(node_value, self.nodes), *self.module.parameters(), *self.module.buffers()]
        dtypes = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
        return max((_TOLERANCES.get(dtype, _COARSE) for dtype in dtypes), default=_TOLERANCES[torch.float32])

    def verdict(self, session: Session) -> _Verdict:
        """Run the module in both ways and compare."""
        before = ModelState(self.model, objects=self.changed)
        try:
            _check_effects(self.nodes[0].graph, self.changed, before)
            return self._compared(session)
        except _CannotCompare as error:
            return _Verdict(str(error))
        except Exception as error:  # NOTE: the model's own code may raise anything
            return _Verdict(in_words(error))
        finally:
            before.restore()

    def _compared(self, session: Session) -> _Verdict:
        if any(
            tensor.is_meta or is_quantized(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())
        ):
            raise _CannotCompare("its tensors are quantized or hold no data")
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
            stack.enter_context(_frozen_if_large(self.module))
            stack.enter_context(without_recorder())
            for autocast in autocasts:
                stack.enter_context(torch.autocast(*autocast))
            try:
                pair = self._pair(self.module, given, session, self.tolerance)
                pair.compile(len(self.regions), self.varies)
                for routing in ("", *ROUTINGS, _ALIKE):
                    difference = pair.difference(routing, self.regions[0].dims.num_experts)
                    if difference and not self._agrees_in_double(given, session, routing):
                        return _Verdict(difference=f"{difference}, routing: {routing or 'as it is'}")
            except _OtherLayer:
                raise
            except _CannotCompare as error:
                return _Verdict(str(error))
        return _Verdict()

    def _pair(self, module: torch.nn.Module, given: Given, session: Session, tolerance: float) -> _Pair:
        return _Pair(module, given, self.changed, session, tolerance, self.compile_graph)

    def _agrees_in_double(self, given: Given, session: Session, routing: str) -> bool:
        """Whether a difference in fp32 is rounding: a copy of the module in fp64 has none."""
        if self.tolerance != _TOLERANCES[torch.float32] or _num_bytes(self.module.parameters()) > _MOST_BYTES:
            return False
        try:
            doubled = copy.deepcopy(self.module).double()
            pair = self._pair(doubled, tree_map(_doubled, given), session, _TOLERANCES[torch.float64])
            pair.compile(len(self.regions), self.varies)
            return not pair.difference(routing, self.regions[0].dims.num_experts)
        except Exception:  # NOTE: a module may neither be copied nor run in fp64; the difference stands then
            return False

    def _arguments(self) -> Iterator[tuple[Given, list[Autocast]]]:
        """The module's own arguments and the autocasts in which it is called: for a few tokens, then for all.

        Raises:
            _CannotCompare: the method that is compiled does not come to the module.
        """
        owner, method, own = self.call.owner, self.call.method, (self.call.args, self.call.kwargs)
        if self.module is owner:
            if method != "forward":
                raise _CannotCompare(f"its method {method} is compiled")
            yield from ((arguments, _autocasts()) for arguments in (*_cut(own), *_whole(own)))
            return
        reason = ""
        for args, kwargs in (*_cut(own), *_whole(own)):
            try:
                reached = self._reached(args, kwargs)
            except Exception as error:  # NOTE: a model may need other numbers of tokens than these
                reason = in_words(error)
            else:
                yield from (
                    (arguments, reached.autocasts) for arguments in (next(_cut(reached.given)), *_whole(reached.given))
                )
        if reason:
            raise _CannotCompare(f"the model does not run on a few tokens: {reason}")

    def _reached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Reached:
        """Run the method that is compiled up to the module's call."""
        writes = Writes()
        try:
            with uninstalled(), _stopping_at(self.module), torch.no_grad(), writes:
                method = getattr(self.call.owner, self.call.method)
                contextvars.copy_context().run(method, *args, **kwargs)  # the end comes before any variable is reset
        except _Reached as reached:
            return reached
        finally:
            writes.restore()
        raise _CannotCompare("the model does not call it")


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


@contextlib.contextmanager
def _stopping_at(module: torch.nn.Module) -> Iterator[None]:
    """The module's forward raises `_Reached`."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Reached((args, kwargs))

    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = stop
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def _autocasts() -> list[Autocast]:
    """Return autocast as it is now, for each kind of device."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = ["cpu", *([] if accelerator is None else [accelerator.type])]
    return [(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in devices]


# Arguments for a few tokens.


def _cut(given: Given) -> Iterator[Given]:
    """Copies of arguments with a few tokens, the likeliest to run first.

    The first tensor says which sizes count tokens: all dimensions of integers, all but the last of floats.
    """
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors:
        yield _copied(given, lambda tensor: tensor)
        return
    first = tensors[0]
    sizes = first.shape[:-1] if first.is_floating_point() and first.ndim > 1 else first.shape
    if math.prod(sizes) <= _MOST_TOKENS:
        yield _copied(given, lambda tensor: tensor)
        return
    if len(sizes) > 1:
        has_width = first.is_floating_point() and first.shape[-1] == sizes[1]
        yield _copied(given, functools.partial(_few_of_both, sizes[0], sizes[1], has_width))
    yield _copied(given, functools.partial(_few_of_first, sizes[0]))


def _whole(given: Given) -> Iterator[Given]:
    """A copy of arguments as they are, unless they are large."""
    if _num_bytes(tree_leaves(given)) <= _MOST_BYTES:
        yield _copied(given, lambda tensor: tensor)


def _num_bytes(values: Iterable[object]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _copied(value: Any, cut: Callable[[Tensor], Tensor]) -> Any:
    """A copy of arguments, their tensors cut and detached."""

    def copied(part: Any) -> Any:
        if isinstance(part, torch.nn.Parameter):
            return part
        return cut(part.detach()).clone() if isinstance(part, Tensor) else _copied_object(part)

    return tree_map(copied, value)


def _copied_object(value: Any) -> Any:
    """A copy of an argument that is no tensor, such as a cache of keys; modules and functions are what they are."""
    is_fixed = value is None or isinstance(value, (int, float, str, torch.dtype, torch.device, torch.nn.Module))
    return value if is_fixed or callable(value) else copy.deepcopy(value)


def _few_of_first(size: int, tensor: Tensor) -> Tensor:
    return tensor[:_FEW_TOKENS] if tensor.ndim and tensor.shape[0] == size else tensor


def _few_of_both(batch: int, length: int, has_width: bool, tensor: Tensor) -> Tensor:
    """One sequence, and few of its tokens; a last dimension of floats may be as wide as the sequence is long."""
    if tensor.ndim and tensor.shape[0] == batch:
        tensor = tensor[:1]
    for dim in range(1, tensor.ndim - (has_width and tensor.is_floating_point())):
        if tensor.shape[dim] == length:
            tensor = tensor.narrow(dim, 0, min(length, _FEW_TOKENS))
    return tensor


# Both runs.


def _call_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return plain_call(module)(*args, **kwargs)


class _Pair:
    """A module's two calls on the same arguments.

    Args:
        module: in the state from which each call begins.
        given: arguments of its forward.
        changed: Python objects outside of the module that its calls may change.
        session: of the model, whose options and flags hold for the module alone.
        tolerance: largest difference, relative to a tensor's norm.
        compile_graph: compiles the captured graph of the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        given: Given,
        changed: Iterable[object],
        session: Session,
        tolerance: float,
        compile_graph: CompileGraph,
    ) -> None:
        self._module, self._given, self._tolerance, self._compile_graph = module, given, tolerance, compile_graph
        self._as_routed: Results = {}
        config = replace(
            session.config, inner_backend="eager", rows_per_chunk=_ROWS_PER_CHUNK, tokens_per_chunk=None, bins=None,
            memory_budget=None, verify=False, gives_up_comparison_with_eager=True,
        )  # fmt: skip
        self._config, self._flags = config, session.capture_flags
        self._forced: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._writes = Writes()
        self._parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._state = ModelState(module, self._parameters.values(), objects=changed)
        self._compiled: Callable[..., Any] = _call_module

    def compile(self, num_regions: int, varies: bool) -> None:
        """Compile the module alone, by a call as it is routed.

        Args:
            num_regions: how many regions of it are chunked in the model.
            varies: whether sizes vary there. If not, they do here only where the module is read otherwise alone: a few
                tokens may be as many as another dimension has entries.

        Raises:
            _OtherLayer: compiled alone it has other regions.
            _CannotCompare: compiled alone it raises.
        """
        other_regions = self._try_to_compile(num_regions, varies)
        if other_regions and not varies:
            other_regions = self._try_to_compile(num_regions, True)
        if other_regions:
            raise _OtherLayer(other_regions)

    def _try_to_compile(self, num_regions: int, dynamic: bool) -> str:
        """Compile the module alone, and say which regions it has; "" where these are as many as in the model.

        Raises:
            _CannotCompare: compiled alone it raises.
        """
        alone = Session(self._config, observer=Observer(runs_here=False))
        alone.start_attempt(self._flags)

        def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            compiled = self._compile_graph(graph_module, inputs, alone)

            def run(*args: Any) -> Any:
                with self._writes, self._forced:  # here, because Dynamo compiles nothing under a dispatch mode
                    return compiled(*args)

            return run

        # A code object of its own, so that what Dynamo compiles for it goes with it.
        function = types.FunctionType(_call_module.__code__.replace(), _call_module.__globals__)
        self._compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
        try:
            self._as_routed = self._results(self._compiled, self._given)
        except Exception as error:  # NOTE: what runs alone may need what the model gives it
            raise _CannotCompare(f"compiled alone it raises {in_words(error)}") from None
        finally:
            self._restore()
        refusals = "; ".join(outcome.details for outcome in alone.outcomes if isinstance(outcome, Refusal))
        has_same = len(alone.lowered) == num_regions
        return "" if has_same else f"compiled alone it has {len(alone.lowered)} chunked regions ({refusals})"

    def _restore(self) -> None:
        self._writes.restore()
        self._state.restore()

    def difference(self, routing: str, num_experts: int | None) -> str:
        """Run both under a routing ("": as it is) and say what differs first; "" where nothing does.

        Args:
            routing: from `ROUTINGS`.
            num_experts: among which choices are forced; None for choices among any number.
        """
        forced = ForcedChoices(routing, num_experts) if routing in ROUTINGS else None
        arguments = tree_map(_alike, self._given) if routing == _ALIKE else self._given
        self._forced = forced or contextlib.nullcontext()
        try:
            # Not the other way round: the state was noted with everything installed.
            self._restore()
            with uninstalled(), self._writes:
                expected = self._results(_call_module, arguments, forced)
            self._restore()
        except Exception as error:  # NOTE: a routing that the model's code does not take
            if routing:
                return ""
            raise _CannotCompare(f"run eagerly it raises {in_words(error)}") from None
        if forced is not None and not forced.num_forced:
            return "" if num_experts is None else self.difference(routing, None)
        try:
            results = self._results(self._compiled, arguments) if routing else self._as_routed
        except Exception as error:  # NOTE: whatever it raises, the model's code does not
            return f"it raises {in_words(error)}"
        finally:
            self._restore()
        return _first_difference(results, expected, self._tolerance)

    def _results(self, call: Callable[..., Any], given: Given, forced: ForcedChoices | None = None) -> Results:
        """Call the module once, and note its outputs, arguments, state and gradients by name."""
        leaves: list[Tensor] = []
        args, kwargs = tree_map(functools.partial(_as_leaf, leaves), given)
        with forced or contextlib.nullcontext():
            output = call(self._module, args, kwargs)
        results = {f"output {place}": _noted(leaf) for place, leaf in enumerate(tree_leaves(output))}
        results |= {f"argument {place}": _noted(leaf) for place, leaf in enumerate(tree_leaves((args, kwargs)))}
        state = _observed(self._module)
        results |= {name: _noted(value) for name, value in state.items()}
        return results | self._gradients([*tree_leaves(output), *tree_leaves(list(state.values()))], leaves)

    def _gradients(self, values: Sequence[object], leaves: Sequence[Tensor]) -> Results:
        """Return the gradients of all values that a call gave, into its arguments and trained parameters."""
        tensors = [
            value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.grad_fn
        ]
        names = [*(f"gradient of argument {place}" for place in range(len(leaves)))]
        names += [f"gradient of {name}" for name in self._parameters]
        sources = [*leaves, *self._parameters.values()]
        if not tensors or not sources:  # a loop over hit experts, given no tokens: gradients of zero and none are alike
            return dict.fromkeys(names)
        probes = [
            torch.linspace(-1, 1, tensor.numel(), device=tensor.device).to(tensor.dtype).view(tensor.shape)
            for tensor in tensors
        ]
        gradients = torch.autograd.grad(tensors, sources, probes, allow_unused=True)
        return {name: _noted(gradient) for name, gradient in zip(names, gradients, strict=True)}


def _as_leaf(leaves: list[Tensor], value: Any) -> Any:
    """An argument for one call: a float gets a gradient, and may be written in place."""
    if not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter):
        return value if isinstance(value, Tensor) else _copied_object(value)
    if not (value.is_floating_point() and torch.is_grad_enabled()):
        return value.clone()
    leaf = value.clone().requires_grad_()
    leaves.append(leaf)
    return leaf.clone()


def _alike(value: Any) -> Any:
    """An argument in which every token is the first one."""
    if not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter) or not value.numel():
        return value
    num_entries = value.shape[-1] if value.is_floating_point() and value.ndim > 1 else 1
    return value.reshape(-1, num_entries)[0].expand(value.shape).clone()


@contextlib.contextmanager
def _frozen_if_large(module: torch.nn.Module) -> Iterator[None]:
    """Take the largest parameters, beyond `_MOST_BYTES` in all, for frozen."""
    trained = sorted(
        (parameter for parameter in module.parameters() if parameter.requires_grad),
        key=lambda parameter: parameter.nbytes,
    )
    sizes = itertools.accumulate(parameter.nbytes for parameter in trained)
    large = [parameter for parameter, size in zip(trained, sizes, strict=True) if size > _MOST_BYTES]
    for parameter in large:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in large:
            parameter.requires_grad_(True)


# What a call changes.


def _observed(module: torch.nn.Module) -> Results:
    """Buffers, attributes, variables of functions and random state, by name."""
    state: Results = {}
    for path, part in module.named_modules():
        state |= {f"buffer {path}.{name}": value for name, value in own_buffers(part).items()}
        state |= {f"{path}.{name}": value for name, value in vars(part).items() if _is_observed(name, value)}
    functions = functions_of(module)
    state |= {f"global {name}": value for _, name, value in named_globals(functions) if _is_comparable(value)}
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not bound yet
                if _is_comparable(cell.cell_contents):
                    state[f"variable {name} of {function.__qualname__}"] = cell.cell_contents
    return state | {
        "random state": torch.get_rng_state(),
        "random state of the accelerator": Generators().of_device,
        "Python's random state": hash(random.getstate()),
    }


def _is_observed(name: str, value: object) -> bool:
    return not name.startswith("_") and name not in _HIDDEN_ATTRIBUTES and _is_comparable(value)


def _is_comparable(value: object) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return len(value) <= _MOST_TOKENS and all(map(_is_comparable, value))
    if isinstance(value, dict):
        return len(value) <= _MOST_TOKENS and all(map(_is_comparable, value.values()))
    if isinstance(value, torch.nn.Parameter):
        return False
    return value is None or isinstance(value, (int, float, str, Tensor))


def _noted(value: Any) -> Any:
    """A copy that later steps do not change."""
    if isinstance(value, (list, tuple)):
        return [_noted(part) for part in value]
    if isinstance(value, dict):
        return {key: _noted(part) for key, part in value.items()}
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _first_difference(results: Results, expected: Results, tolerance: float) -> str:
    missing = results.keys() ^ expected.keys()
    if missing:
        return f"only one of them has {min(missing)}"
    scales = [_norm(value) for name, value in expected.items() if name.startswith("gradient")]
    least = _LEAST_SHARE * max(scales, default=0.0)
    for name, value in expected.items():
        difference = _difference(results[name], value, least if name.startswith("gradient") else 0.0, tolerance)
        if difference:
            return f"{name} {difference}"
    return ""


def _difference(value: Any, expected: Any, least: float, tolerance: float) -> str:
    """Say how two values differ, "" where they do not; tensors by their norm, which counts as `least` or more."""
    if isinstance(value, Tensor) or isinstance(expected, Tensor):
        return _difference_of_tensors(value, expected, least, tolerance)
    pairs: list[tuple[Any, Any]] = []
    if isinstance(expected, list) and isinstance(value, list) and len(value) == len(expected):
        pairs = list(zip(value, expected, strict=True))
    elif isinstance(expected, dict) and isinstance(value, dict) and value.keys() == expected.keys():
        pairs = [(value[key], expected[key]) for key in expected]
    elif isinstance(expected, float) and isinstance(value, float):
        is_close = math.isclose(value, expected, rel_tol=tolerance) or (math.isnan(value) and math.isnan(expected))
        return "" if is_close else f"is {value}, not {expected}"
    elif (expected is None or isinstance(expected, _PLAIN)) and value != expected:
        return f"is {value!r}, not {expected!r}"[:200]
    return next(filter(None, (_difference(part, expected_part, least, tolerance) for part, expected_part in pairs)), "")


def _difference_of_tensors(value: Any, expected: Any, least: float, tolerance: float) -> str:
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
        tensor, other = (value, expected) if isinstance(value, Tensor) else (expected, value)
        return "" if other is None and not bool(tensor.any()) else "is a tensor in one of them only"
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return f"is {value.dtype} {list(value.shape)}, not {expected.dtype} {list(expected.shape)}"
    if not expected.is_floating_point():
        return "" if torch.equal(value, expected) else "differs"
    distance, norm = _norm(_wide(expected) - _wide(value)), _norm(expected)
    if not math.isfinite(distance):
        exact, other = expected.double(), value.double()
        if not torch.equal(exact.isfinite(), other.isfinite()):
            return "has other entries that are not finite"
        distance, norm = (_norm(part.nan_to_num(0.0, 0.0, 0.0)) for part in (exact - other, exact))
    error = distance / max(norm, least, 1e-12)
    return "" if error <= tolerance else f"is off by {error:.1e} relative"


def _norm(value: Any) -> float:
    """Return the norm of a tensor of floats, 0.0 of anything else; squares of large numbers need fp64."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0.0
    norm = float(_wide(value).norm())
    return norm if math.isfinite(norm) else float(value.double().norm())


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
