"""`torch.compile(model, backend="memfine", options={...})`: the entry point and its sessions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memfine_fx import progress
from memfine_fx.compat.chunking import can_chunk
from memfine_fx.compat.dynamo import break_behind, plain_compiler
from memfine_fx.compat.interpreter import compiled_call
from memfine_fx.compiler.session import Session
from memfine_fx.compiler.sessions import open_session
from memfine_fx.config import Config
from memfine_fx.errors import ConfigError, MemfineError
from memfine_fx.runtime.routing_hooks import paused

__all__ = ["compile_in_session", "memfine"]

_UNSUPPORTED_MODES = ("reduce-overhead", "max-autotune")
_sessions: dict[tuple[Config, str | None], Session] = {}
_lock = threading.Lock()


def memfine(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Dynamo backend. Options are the fields of `memfine_fx.Config`.

    A malformed option raises `ConfigError` at the first call of the compiled function.
    """
    try:
        if mode in _UNSUPPORTED_MODES:
            raise ConfigError(
                f"mode={mode!r} uses CUDA graphs, which keep memory of their own that no plan counts; "
                "use mode='default' or 'max-autotune-no-cudagraphs'"
            )
        config = Config.from_options(options)
        with _lock:
            if (config, mode) not in _sessions:
                _sessions[config, mode] = open_session(config, mode=mode)
    except MemfineError as error:
        return _raising(error)
    return compile_in_session(graph_module, example_inputs, _sessions[config, mode])


def compile_in_session(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], session: Session
) -> Callable[..., Any]:
    """Run the pipeline on one graph; errors meant for the user surface where the model is called.

    NOTE: what a backend raises, Dynamo wraps in BackendCompilerFailed. A callable that raises it reaches the
    user as the typed error that it is.
    """
    if not can_chunk(session.config.inner_backend):
        session.diagnostics.has_warned = True  # of what is lost; that there are no regions follows
        plain: Callable[..., Any] = plain_compiler(session.config.inner_backend)(graph_module, list(example_inputs))
        return plain
    from memfine_fx.compiler.logs import said_to_compile, warn_without_regions
    from memfine_fx.compiler.pipeline import compile_graph
    from memfine_fx.passes.dataflow import BREAK

    stack = break_behind(graph_module)
    if stack is not None:
        graph_module.graph.output_node().meta[BREAK] = stack
    call = None if session.holds_compiled else compiled_call()
    if call is not None and call.model is not None:
        session.models.add(call.model)
    model = next(iter(session.models), None) if call is None else call.model
    says_so = said_to_compile(session, model) if session.observer.compiles else contextlib.nullcontext()
    try:
        with says_so, paused(), progress.stage("compiling code"):
            compiled = compile_graph(graph_module, example_inputs, session)
    except MemfineError as error:
        return _raising(error)
    has_chunked = bool(session.graphs and session.graphs[-1].live_regions())
    if has_chunked or session.holds_compiled:  # `OptimizedCall` warns after its call
        return session.hold_compiled(compiled)

    weight_ids: set[int | None] = set()
    has_asked = False

    def warns_on_second_step(*args: Any) -> Any:
        """Run the graph, and at its second call with the same weights warn if nothing was chunked.

        By that call every graph of the first step is compiled, so it is known whether there are regions. Equal modules
        share a graph within a step, with weights of their own or, as activations, without any.
        """
        nonlocal has_asked
        if not has_asked:
            weight = next((id(value) for value in args if isinstance(value, torch.nn.Parameter)), None)
            if weight in weight_ids and (
                weight is not None or not any(graph.alive_parameters() for graph in session.graphs)
            ):
                has_asked = True
                warn_without_regions(session)
            weight_ids.add(weight)
        return compiled(*args)

    return session.hold_compiled(warns_on_second_step)


def _raising(error: MemfineError) -> Callable[..., Any]:
    def raise_error(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raise_error
