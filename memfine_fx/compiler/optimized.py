"""The call of an optimized model, which its copies take along.

`optimize` puts an `OptimizedCall` where `torch.nn.Module.compile` puts its own. torch drops what stands there when a
module is copied or pickled, so the call stands among the attributes of the module too. Copying or pickling it gives a
call of the copy, with the same options. The copy exists then, because copy and pickle remember an object before they
fill it, but it is empty: so its session opens at its first call.

A shallow copy (`copy.copy`) holds nothing by which it differs from its model, so it loses the call, and a warning says
so.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfine_fx.capture.adapters import TracedAdapters
from memfine_fx.capture.flags import CapturingCall
from memfine_fx.capture.forward_wrappers import (
    ForwardWrappers,
    backbones,
    behind,
    is_compiled_inside,
    replaced_by,
    state_as_written,
    wrap_forward,
)
from memfine_fx.capture.implementation import switch_experts
from memfine_fx.capture.input_gradients import WantedInputGradients
from memfine_fx.capture.output_recorders import RecordedOutputs
from memfine_fx.capture.quantized import UncachedTables, hint_for_packed_layers, traced_layers
from memfine_fx.capture.ranks import captured_on_ranks, kept_whole
from memfine_fx.capture.structure import FoundAgain, may_hold_experts
from memfine_fx.compat.interpreter import calling_code
from memfine_fx.compat.nn import plain_call, set_compiled_call
from memfine_fx.compat.settings import ignoring_debug_logging
from memfine_fx.compiler.recompile_limit import RecompileLimit
from memfine_fx.config import Config
from memfine_fx.errors import MemfineError
from memfine_fx.records import short_place
from memfine_fx.runtime.routing_hooks import replay_of

if TYPE_CHECKING:  # what plans imports sympy, which would be most of the package's import time
    from memfine_fx.compiler.captured_graph import CapturedGraph
    from memfine_fx.compiler.session import Session

__all__ = ["OptimizedCall", "Options", "captured", "optimize_in_place", "optimized_call", "restored"]

_ATTRIBUTE = "_memfine_call"
_GETSTATE, _SETSTATE = "__getstate__", "__setstate__"
_CALL = -1
_lock = threading.RLock()
_living: weakref.WeakSet[OptimizedCall] = weakref.WeakSet()
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Options:
    """How a model was optimized.

    Args:
        config: with the other arguments of `optimize`.
        fullgraph, dynamic: of `torch.compile`.
        on_ranks: whether its experts are on several ranks.
    """

    config: Config
    fullgraph: bool = False
    dynamic: bool | None = None
    on_ranks: bool = False


class OptimizedCall:
    """The compiled call of an optimized model, which opens its session when it first runs.

    Args:
        model: the optimized module.
        options: how it was optimized.
    """

    def __init__(self, model: torch.nn.Module, options: Options) -> None:
        self.model = model
        self.has_run = False
        self.session: Session | None = None
        self._options = options
        self._compiled: dict[bool, tuple[Session, Callable[..., Any]]] = {}

    def install(self) -> None:
        """Put the call in its places, and where copies of the model find it."""
        set_compiled_call(self.model, self)
        attributes = vars(self.model)
        attributes[_ATTRIBUTE], attributes[_GETSTATE] = self, self.state_of_model
        self._stand()
        _living.add(self)
        _watch_optimizers()

    def install_once_filled(self) -> None:
        """Install it in a model that copy or pickle is about to fill: parts of it exist after that."""
        attributes = vars(self.model)
        attributes[_ATTRIBUTE], attributes[_SETSTATE] = self, self._fill

    def _fill(self, state: Any) -> None:
        del vars(self.model)[_SETSTATE]
        type(self.model).__setstate__(self.model, state)  # type: ignore[no-untyped-call]  # of nn.Module
        self.install()

    def _stand(self) -> None:
        for part, forward in self._forward_wrappers:
            attributes = vars(part)
            attributes["forward"] = forward
            attributes.setdefault(_GETSTATE, functools.partial(_state_of_part, part))

    @functools.cached_property
    def parts(self) -> list[torch.nn.Module]:
        """The model and its backbones."""
        return [self.model, *backbones(self.model)]

    @functools.cached_property
    def _forward_wrappers(self) -> list[tuple[torch.nn.Module, Callable[..., Any]]]:
        """The parts, with what is to stand in the places of their forwards."""
        return [(part, wrap_forward(part, self, place)) for place, part in enumerate(self.parts)]

    def prepare(self, *, replays_routing: bool = False) -> tuple[Session, Callable[..., Any]]:
        """Open the session of steps that replay a routing, or of the others; once. Return it with its compiled call."""
        if replays_routing not in self._compiled:
            with _lock:
                if replays_routing not in self._compiled:
                    self._compiled[replays_routing] = self._prepared(replays_routing)
        self.session, _ = self._compiled[replays_routing]
        return self._compiled[replays_routing]

    def _prepared(self, replays_routing: bool) -> tuple[Session, Callable[..., Any]]:
        from memfine_fx.compiler.sessions import open_session

        options, model = self._options, self.model
        session = open_session(options.config, holds_compiled=True, replays_routing=replays_routing)
        session.models.add(model)
        if options.config.captures_loops:
            session.diagnostics.notes.extend(switch_experts(model))
        calls = [functools.partial(behind, forward) for _, forward in self._forward_wrappers]
        calls.append(functools.partial(_traced_call, model))
        call = captured(model, calls, session, fullgraph=options.fullgraph, dynamic=options.dynamic)
        return session, captured_on_ranks(model, call) if options.on_ranks else call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiled_inside():
            return plain_call(self.model)(*args, **kwargs)
        return self.dispatch(_CALL, *args, **kwargs)

    def dispatch(self, place: int, *args: Any, **kwargs: Any) -> Any:
        """One of the compiled calls: the forward of the model (0) or of a backbone, or the whole call (-1).

        Where somebody else compiles code that calls the model, this stays out of their graph.
        """
        return self._outside_graphs(place, *args, **kwargs)

    @functools.cached_property
    def _outside_graphs(self) -> Callable[..., Any]:
        run: Callable[..., Any] = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]
        return run

    def _run(self, place: int, *args: Any, **kwargs: Any) -> Any:
        session, compiled = self.prepare(replays_routing=replay_of(self.model) is not None)
        with session.diagnostics.noting_breaks(), self._said_to_compile(session):
            result = compiled(place, *args, **kwargs)
        self.has_run = True
        if not session.diagnostics.has_warned and not session.has_chunked:
            from memfine_fx.compiler.logs import warn_without_regions

            warn_without_regions(session)
        return result

    def _said_to_compile(self, session: Session) -> contextlib.AbstractContextManager[None]:
        """Return a context for one call: the first one compiles, which takes long, and says so."""
        if self.has_run:
            return contextlib.nullcontext()
        from memfine_fx.compiler.logs import said_to_compile

        return said_to_compile(session, self.model)

    def state_of_model(self) -> Any:
        """The model's state as copy and pickle ask for it: what its class gives, less this method.

        Raises:
            MemfineError: pickle asks, and experts are on several ranks: one rank's pickle would not be the model.
        """
        asks = calling_code()
        if self._options.on_ranks and asks not in (copy.copy.__code__, copy.deepcopy.__code__):
            raise MemfineError(
                "a model whose experts are on several ranks cannot be pickled whole: save its state dict with "
                "memfine_fx.expert_parallel.state.TrainingState, or whole_state_dict(model) for one file"
            )
        state: Any = type(self.model).__getstate__(self.model)  # type: ignore[no-untyped-call]  # of nn.Module
        if not isinstance(state, dict) or _GETSTATE not in state:
            return state
        state = _without_ours(self.model, state)
        if asks is copy.copy.__code__:
            del state[_ATTRIBUTE]
            warnings.warn(
                "copy.copy of an optimized model shares its parameters and runs as plain torch: "
                "memfine_fx.optimize(the copy) optimizes it too, and copy.deepcopy(model) gives an optimized copy",
                stacklevel=3,
            )
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedCall:
        return _installed(copy.deepcopy(self.model, memo), self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        options, defaults = self._options, Config()
        fields = {field.name: getattr(options.config, field.name) for field in dataclasses.fields(Config)}
        changed = {name: value for name, value in fields.items() if value != getattr(defaults, name)}
        return restored, (self.model, changed, options.fullgraph, options.dynamic)


def optimize_in_place(model: torch.nn.Module, options: Options) -> None:
    """Open a session for a model and let its calls arrive there."""
    call = OptimizedCall(model, options)
    call.prepare()
    call.install()


def _traced_call(model: torch.nn.Module) -> Callable[..., Any]:
    """The plain call of a model, which Dynamo captures from the model's forward on.

    NOTE: it passes over frames of torch's own modules, and would capture each layer of a `Sequential` alone: those get
    a frame before them.
    """
    is_of_torch = str(type(model).forward.__module__).startswith("torch.nn.")
    return types.MethodType(_call_whole, model) if is_of_torch else plain_call(model)


def _call_whole(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return plain_call(self)(*args, **kwargs)


def _state_of_part(part: torch.nn.Module) -> Any:
    """The state of a backbone for its copies: without what stands in it for the optimized model."""
    state: Any = type(part).__getstate__(part)  # type: ignore[no-untyped-call]  # of nn.Module
    return _without_ours(part, state) if isinstance(state, dict) else state


def _without_ours(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state_as_written(module, state).items() if name != _GETSTATE}


def restored(model: torch.nn.Module, fields: Mapping[str, Any], fullgraph: bool, dynamic: bool | None) -> OptimizedCall:
    """The call of a model that is being read from a pickle: builtin types only, so that one function is all it needs.

    Raises:
        ConfigError: it was optimized with an option that this version does not know.
    """
    return _installed(model, Options(Config.from_options({"config": Config(), **fields}), fullgraph, dynamic))


# NOTE: a pickle names this function by these, so it is read wherever the function lives by then. Never change them.
restored.__module__, restored.__name__, restored.__qualname__ = "memfine_fx", "_restored", "_restored"


def _installed(model: torch.nn.Module, options: Options) -> OptimizedCall:
    call = OptimizedCall(model, options)
    call.install_once_filled()
    return call


def optimized_call(model: object) -> OptimizedCall | None:
    """The call of an optimized model, None of any other."""
    call = vars(model).get(_ATTRIBUTE) if isinstance(model, torch.nn.Module) else None
    return call if isinstance(call, OptimizedCall) and call.model is model else None


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_warn_of_bypassed)


def _warn_of_bypassed(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """After an optimizer's first step, warn once of each model that was trained without any of its compiled calls.

    By then every graph of a training step exists. A model whose parameters have gradients although none of its calls
    has run was called in a way that no forward wrapper covers; nobody would notice but by the memory.
    """
    if optimizer in _stepped:
        return
    _stepped.add(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = {id(parameter) for parameter in parameters if parameter.grad is not None}
    for call in list(_living):
        if not call.has_run and any(id(parameter) in trained for parameter in call.model.parameters()):
            call.has_run = True  # warned once
            warnings.warn(
                f"memfine_fx.optimize has no part in training: {type(call.model).__name__} has gradients, but none of "
                f"its calls was ours. {_how_it_was_bypassed(call)}",
                stacklevel=2,
            )


def _how_it_was_bypassed(call: OptimizedCall) -> str:
    replaced = next(((part, forward) for part in call.parts if (forward := replaced_by(part)) is not None), None)
    if replaced is None:
        return (
            "Its layers are called one by one, or its class's forward directly: call memfine_fx.optimize on the "
            "module that the training loop calls"
        )
    part, forward = replaced
    function = getattr(forward, "__func__", forward)
    name, code = getattr(function, "__qualname__", type(function).__name__), getattr(function, "__code__", None)
    place = "" if code is None else f" ({short_place(f'{code.co_filename}:{code.co_firstlineno}')})"
    return (
        f"The forward of {type(part).__name__} was replaced by {name}{place}: call memfine_fx.optimize(model) again, "
        "after that"
    )


def captured(
    model: torch.nn.Module,
    calls: Sequence[Callable[[], Callable[..., Any]]],
    session: Session,
    *,
    fullgraph: bool,
    dynamic: bool | None,
) -> Callable[..., Any]:
    """Calls of a model compiled in a session, under the capture flags that help.

    Args:
        model: that is prepared for each call.
        calls: what gives a call of the model or of a backbone once the model is prepared for it. Each is compiled when
            it is first made, by itself, so that Dynamo sees its own signature.

    Returns:
        (place in `calls`, arguments) -> what the call returns.
    """

    def compile_with(capture_flags: tuple[str, ...], note_compilation: Callable[[], None]) -> Callable[..., Any]:
        session.start_attempt(capture_flags)
        backend = _backend_of(session, note_compilation)
        compile_call = functools.partial(
            torch.compile, backend=backend, fullgraph=fullgraph, dynamic=dynamic, **_counted_alone()
        )
        compiled: dict[tuple[int, object], Callable[..., Any]] = {}

        def run(place: int, *args: Any, **kwargs: Any) -> Any:
            call = calls[place]()
            of_call = place, getattr(call, "__func__", call)
            if of_call not in compiled:
                compiled[of_call] = compile_call(call)
            return compiled[of_call](*args, **kwargs)

        return run

    def note(capture_flags: tuple[str, ...], failure: str | None) -> None:
        if capture_flags and any(lowered.region.family == "loops" for lowered in session.lowered):
            session.diagnostics.notes.append(
                f"expert loops captured with torch._dynamo.config.{', '.join(capture_flags)}"
            )
        elif failure is not None and not capture_flags:
            session.diagnostics.notes.append(
                f"code with data-dependent shapes stays outside the graph: {failure}. If that is a loop over experts, "
                "let it take each expert's rows with torch.where(index == expert) and add them back with index_add_"
            )

    captures_loops = session.config.captures_loops
    if captures_loops:
        note_loop = functools.partial(_note_loop, model, session)
        compiled: Callable[..., Any] = CapturingCall(model, compile_with, note, note_loop)
    else:
        compiled = compile_with((), lambda: None)
    parts = FoundAgain(model, _SpecialParts)
    session.diagnostics.notes.extend(parts.current().adapters.notes)
    session.diagnostics.hint = hint_for_packed_layers(model)

    @functools.wraps(compiled)
    def call_prepared(place: int, *args: Any, **kwargs: Any) -> Any:
        with parts.current().prepared(kwargs, session.graphs):
            return compiled(place, *args, **kwargs)

    return call_prepared


def _note_loop(model: torch.nn.Module, session: Session, path: str, place: str, reason: str) -> None:
    """Let a report say of a loop that it stays as it is written, if experts may be what it runs over."""
    modules = dict(model.named_modules())
    if path not in modules or may_hold_experts(modules[path]):
        session.diagnostics.note_loop(path, place, reason)


class _SpecialParts:
    """Parts of a model (adapters, recorders, quantized tables) that are exchanged while Dynamo captures it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.adapters = TracedAdapters(model)
        self._forward_wrappers, self._recorded = ForwardWrappers(model), RecordedOutputs(model)
        self._embeddings, self._uncached = WantedInputGradients(model), UncachedTables(model)
        self._in_4_bits = traced_layers(model)
        self._limit = RecompileLimit(model)

    @contextlib.contextmanager
    def prepared(self, kwargs: Mapping[str, Any], graphs: Sequence[CapturedGraph]) -> Iterator[None]:
        """For one call with these arguments, of a model that was compiled to these graphs until now."""
        self._embeddings.prepare()
        with (
            self._forward_wrappers.unpatched(),
            self._recorded.prepared(kwargs),
            self.adapters.installed(),
            self._uncached.installed(),
            self._in_4_bits.installed(),
            ignoring_debug_logging(),
            self._limit.applied(graphs),
            kept_whole(),
        ):
            yield


def _counted_alone() -> dict[str, Any]:
    """Recompilations counted for this call alone, where torch can.

    Dynamo counts them by code, and stops compiling after eight: the ninth copy of a model, or a model after eight
    `explain` of its class, would run as it is written.
    """
    name = "isolate_recompiles"
    return {name: True} if name in inspect.signature(torch.compile).parameters else {}


def _backend_of(session: Session, note_compilation: Callable[[], None]) -> Callable[..., Any]:
    """The session as a backend.

    NOTE: Dynamo keeps every backend that it has seen, so this one keeps nothing alive and is taken out of its list when
    the session is gone.
    """
    from memfine_fx.compat.dynamo import forget_backend_after

    its_session = weakref.ref(session)
    its_note = weakref.WeakMethod(note_compilation) if inspect.ismethod(note_compilation) else None

    def memfine(graph_module: Any, example_inputs: Any, **_: Any) -> Callable[..., Any]:
        from memfine_fx.compiler.entry import compile_in_session

        note, living = None if its_note is None else its_note(), its_session()
        assert living is not None, "a model that compiles holds its session"
        if note is not None:
            note()
        return compile_in_session(graph_module, example_inputs, living)

    forget_backend_after(session, memfine)
    return memfine
