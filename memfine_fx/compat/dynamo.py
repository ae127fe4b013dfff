"""Dynamo: settings for captures, what compiling raises, names of backends, and mode switches in its graphs."""

from __future__ import annotations

import contextlib
import importlib
import logging
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from memfine_fx.compat.checks import Feature, expect
from memfine_fx.compat.loading import DYNAMO_BACKENDS

__all__ = [
    "BACKENDS",
    "CAPTURE_FLAGS",
    "CUT_GRAPHS",
    "DEBUG_LINES",
    "FLOATS",
    "INTEGERS",
    "MODE_SWITCHES",
    "RECORDING",
    "SEEN_BACKENDS",
    "capturing_more",
    "compile_failures",
    "cuts_graphs",
    "debug_lines_left_out",
    "floats_as_constants",
    "forget_backend_after",
    "integers_as_constants",
    "kept_whole",
    "mode_switch",
    "plain_compiler",
    "recording_under_checkpoints",
    "register_backend",
]

_SWITCHES: dict[str, Literal["grad", "enter autocast", "exit autocast"]] = {
    "_set_grad_enabled": "grad",
    "_enter_autocast": "enter autocast",
    "_exit_autocast": "exit autocast",
}
_LOGGING = "ignore_logging_functions"
_LOGGING_OF_OLD = "ignore_logger_methods"


def _config() -> Any:
    return importlib.import_module("torch._dynamo.config")


def capturing_more(flags: tuple[str, ...]) -> contextlib.AbstractContextManager[object]:
    """For compilations inside: these flags on, and backward graphs compiled at once, to fail in the forward."""
    import torch._functorch.config

    stack = contextlib.ExitStack()
    stack.enter_context(_config().patch(dict.fromkeys(flags, True)))
    stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
    return stack


def compile_failures() -> tuple[type[Exception], ...]:
    """Return the exception classes that a failed compilation raises."""
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return TorchDynamoException, GuardOnDataDependentSymNode


def kept_whole() -> contextlib.AbstractContextManager[object]:
    """For compilations inside: graphs that are not cut at the buckets of DistributedDataParallel."""
    if not CUT_GRAPHS.holds():
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[object] = _config().patch(optimize_ddp=False)
    return patched


def cuts_graphs() -> bool:
    """Whether graphs of a model under DistributedDataParallel are cut at its buckets."""
    return CUT_GRAPHS.holds() and bool(_config().optimize_ddp)


def integers_as_constants() -> contextlib.AbstractContextManager[object]:
    """For captures inside: integers that a module holds are constants, whoever manages the module."""
    if not INTEGERS.holds():
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[object] = _config().patch(specialize_int=True)
    return patched


def floats_as_constants() -> contextlib.AbstractContextManager[object]:
    """For captures inside: no float is an input, as one is at first where sizes vary; that capture is given up for most
    models, and made again."""
    if not FLOATS.holds():
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[object] = _config().patch(specialize_float=True)
    return patched


def debug_lines_left_out() -> contextlib.AbstractContextManager[object]:
    """For compilations inside: what code logs at DEBUG breaks no graph, and is not written, beside what the user has
    Dynamo ignore."""
    if not DEBUG_LINES.holds():
        return contextlib.nullcontext()
    name = _ignored_logging()
    ignored = _Unwritten(dict.fromkeys([*getattr(_config(), name), logging.Logger.debug]))
    patched: contextlib.AbstractContextManager[object] = _config().patch({name: ignored})
    return patched


class _Unwritten(dict[Any, None]):
    """Functions, by `in` and one after another, and nothing as JSON: torch 2.11 writes its settings down after every
    compilation, and where functions are among them logs an error whose traceback keeps the model alive."""

    def items(self) -> Any:
        return {}.items()


def _ignored_logging() -> str:
    """The setting's name, which torch renamed."""
    return _LOGGING if hasattr(_config(), _LOGGING) else _LOGGING_OF_OLD


def recording_under_checkpoints() -> contextlib.AbstractContextManager[object]:
    """For compilations inside: what a checkpointed forward appends to a list, its recomputation leaves out."""
    if not RECORDING.holds():
        return contextlib.nullcontext()
    flag = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    patched: contextlib.AbstractContextManager[object] = _config().patch({flag: True})
    return patched


def mode_switch(name: str) -> Literal["grad", "enter autocast", "exit autocast"] | None:
    """Which mode a call of Dynamo's graph switches, by the name of its target."""
    return _SWITCHES.get(name)


def register_backend(registry: Any, backend: Callable[..., Any], name: str) -> None:
    """Make a backend known by name to the module that keeps them, once."""
    try:
        if name not in getattr(registry, "_COMPILER_FNS", {}):
            registry.register_backend(backend, name=name)
    except (AttributeError, TypeError, AssertionError) as error:
        BACKENDS.give_up(str(error))


def forget_backend_after(owner: object, backend: Callable[..., Any]) -> None:
    """Once its owner is gone, take a backend out of the list in which Dynamo keeps each one that it has seen.

    NOTE: the feature is asked now, because owners may go while garbage is collected in the middle of anything, an
    import or a check of another feature too, and nothing may be waited for there.
    """
    if SEEN_BACKENDS.holds():
        weakref.finalize(owner, _forget_backend, backend).atexit = False


def _forget_backend(backend: Callable[..., Any]) -> None:
    backends = _seen_backends()
    for key in [key for key, entry in list(backends.items()) if getattr(entry, "compiler_fn", entry) is backend]:
        del backends[key]


def _seen_backends() -> dict[int, Any]:
    backends: dict[int, Any] = importlib.import_module("torch._dynamo.eval_frame").cached_backends
    return backends


def plain_compiler(inner_backend: str) -> Callable[..., Any]:
    """The compiler behind ours by its name, as torch.compile would find it."""
    compiler: Callable[..., Any] = torch._dynamo.lookup_backend(inner_backend)
    return compiler


def _check_capture_flags() -> None:
    import torch._functorch.config

    expect(len(compile_failures()) == 2, "what compiling raises has no name")
    for flag in ("capture_dynamic_output_shape_ops", "capture_scalar_outputs"):
        expect(getattr(_config(), flag) in (True, False), f"{flag} is no switch")
    expect(
        torch._functorch.config.force_non_lazy_backward_lowering in (True, False), "backward is compiled at any time"
    )


def _check_setting(name: str) -> None:
    value = getattr(_config(), name)
    with _config().patch({name: value}):
        expect(getattr(_config(), name) == value, f"{name} cannot be set")


def _check_switches() -> None:
    autocast = importlib.import_module("torch.amp.autocast_mode")
    switches = (torch._C._set_grad_enabled, autocast._enter_autocast, autocast._exit_autocast)
    names = {switch.__name__ for switch in switches}
    expect(names == set(_SWITCHES), f"switches are called {sorted(names)}")


def _check_seen_backends() -> None:
    def backend(graph_module: Any, inputs: Any) -> Any:
        return graph_module

    torch.compile(lambda value: value, backend=backend)
    entries = [entry for entry in _seen_backends().values() if getattr(entry, "compiler_fn", entry) is backend]
    for key in [key for key, entry in _seen_backends().items() if entry in entries]:
        del _seen_backends()[key]
    expect(len(entries) == 1, "a backend that was given is not in the list")


def _check_backends() -> None:
    registry = importlib.import_module(DYNAMO_BACKENDS)
    expect(callable(registry.register_backend), "there is no register_backend")
    expect("memfine" in registry._COMPILER_FNS or "memfine" in registry.list_backends(), "memfine is not among them")


CAPTURE_FLAGS = Feature(
    name="torch._dynamo.config.capture_dynamic_output_shape_ops",
    package="torch",
    purpose="loops over experts in one graph: each expert takes as many rows as the routing gives it",
    seen=("2.11", "2.15"),
    fallback="Loops over experts that take rows by the routing stay outside the graphs, and are not chunked.",
    check=_check_capture_flags,
)
CUT_GRAPHS = Feature(
    name="torch._dynamo.config.optimize_ddp",
    package="torch",
    purpose="graphs that DistributedDataParallel does not cut through the experts",
    seen=("2.11", "2.15"),
    fallback="Under DistributedDataParallel graphs may be cut through the experts, which are then not chunked.",
    check=lambda: _check_setting("optimize_ddp"),
)
INTEGERS = Feature(
    name="torch._dynamo.config.specialize_int",
    package="torch",
    purpose="numbers of heads and of expert groups that stay constants in a model that FSDP2 shards",
    seen=("2.11", "2.15"),
    fallback="Models that FSDP2 shards may be captured with sizes that vary, and their experts then not be chunked.",
    check=lambda: _check_setting("specialize_int"),
)
DEBUG_LINES = Feature(
    name="torch._dynamo.config.ignore_logging_functions",
    package="torch",
    purpose="layers that log at DEBUG between routing and experts, as those of transformers 5.6 to 5.13 do in bf16",
    seen=("2.11", "2.15"),
    fallback="Layers that log at DEBUG between routing and experts break graphs there, and are not chunked.",
    check=lambda: _check_setting(_ignored_logging()),
)
FLOATS = Feature(
    name="torch._dynamo.config.specialize_float",
    package="torch",
    purpose="reading a model's graph from its first capture",
    seen=("2.13", "2.13"),
    fallback="`memfine fit` captures most models twice, which takes longer and says the same.",
    check=lambda: _check_setting("specialize_float"),
)
RECORDING = Feature(
    name="torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint",
    package="torch",
    purpose="models that record router logits or hidden states under gradient checkpointing",
    seen=("2.11", "2.15"),
    fallback="Layers that record outputs (output_router_logits, output_hidden_states) under gradient checkpointing "
    "stay outside the graphs, and are not chunked.",
    check=lambda: _check_setting("skip_fwd_side_effects_in_bwd_under_checkpoint"),
)
MODE_SWITCHES = Feature(
    name="torch._C._set_grad_enabled",
    package="torch",
    purpose="seeing which part of a graph runs under no_grad, and which under autocast",
    seen=("2.11", "2.15"),
    fallback="Modes of a graph cannot be seen, so nothing is chunked: models are compiled as without memfine_fx.",
    check=_check_switches,
)
BACKENDS = Feature(
    name="torch._dynamo.backends.registry.register_backend",
    package="torch",
    purpose='torch.compile(model, backend="memfine") in a checkout that is not installed',
    seen=("2.11", "2.15"),
    fallback='torch.compile(backend="memfine") finds the backend only where the package is installed; '
    "memfine_fx.optimize(model) works.",
    check=_check_backends,
)
SEEN_BACKENDS = Feature(
    name="torch._dynamo.eval_frame.cached_backends",
    package="torch",
    purpose="optimized models that leave nothing behind when they are gone",
    seen=("2.11", "2.15"),
    fallback="A small function stays in memory for each model that was optimized or explained, until "
    "torch._dynamo.reset().",
    check=_check_seen_backends,
)
