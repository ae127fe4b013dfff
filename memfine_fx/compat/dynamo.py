"""Dynamo: what compiling raises, names of backends, mode switches in its graphs, and records in TORCH_TRACE."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from memfine_fx.compat.checks import Feature, expect
from memfine_fx.compat.settings import CAPTURE_FLAGS

__all__ = [
    "GRAPH_BREAKS",
    "RECORDS",
    "SEEN_BACKENDS",
    "break_behind",
    "capturing_more",
    "check_mode_switches",
    "compile_failures",
    "forget_backend_after",
    "graph_breaks",
    "last_failure",
    "mode_switch",
    "num_frames",
    "plain_compiler",
    "register_backend",
    "trace_artifact",
]

_SWITCHES: dict[str, Literal["grad", "enter autocast", "exit autocast"]] = {
    "_set_grad_enabled": "grad",
    "_enter_autocast": "enter autocast",
    "_exit_autocast": "exit autocast",
}


def capturing_more(flags: tuple[str, ...]) -> contextlib.AbstractContextManager[object]:
    """For compilations inside: these flags on, and backward graphs compiled at once, to fail in the forward."""
    import torch._functorch.config

    stack = contextlib.ExitStack()
    stack.enter_context(CAPTURE_FLAGS.config.patch(dict.fromkeys(flags, True)))
    stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
    return stack


def compile_failures() -> tuple[type[Exception], ...]:
    """Return the exception classes that a failed compilation raises."""
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return TorchDynamoException, GuardOnDataDependentSymNode


def mode_switch(name: str) -> Literal["grad", "enter autocast", "exit autocast"] | None:
    """Which mode a call of Dynamo's graph switches, by the name of its target."""
    return _SWITCHES.get(name)


def register_backend(registry: Any, backend: Callable[..., Any], name: str) -> None:
    """Make a backend known by name to Dynamo's registry, a module, once."""
    if name not in getattr(registry, "_COMPILER_FNS", {}):
        registry.register_backend(backend, name=name)


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


def num_frames() -> int:
    """Return how many frames Dynamo has begun to compile in this process."""
    return int(_utils().counters["frames"]["total"]) if GRAPH_BREAKS.holds() else 0


def graph_breaks() -> Counter[str]:
    """Return how often Dynamo broke a graph or gave up on a frame in this process, by "reason at file:line"."""
    if not GRAPH_BREAKS.holds():
        return Counter()
    breaks: Counter[str] = Counter()
    has_place = set()
    for reason in _utils().graph_break_reasons:
        has_place.add(reason.reason)
        place = reason.user_stack[-1] if reason.user_stack else None
        breaks[_brief(reason.reason) + (f" at {place.filename}:{place.lineno}" if place else "")] += 1
    for kind in ("unimplemented", "graph_break"):
        for text, count in _utils().counters[kind].items():
            skipped = _SKIPPED.search(text)
            if skipped is not None:  # such a frame has no graph, and is in no other list
                breaks[f"{_brief(text)} in {skipped[1]} at {_given_up_at(text, skipped)}"] += count
            elif text not in has_place:
                breaks[_brief(text)] += count
    return breaks


def break_behind(graph_module: torch.nn.Module) -> str | None:
    """Return the stack of the user's code, as text, at whose end Dynamo broke the graph; None where it did not.

    Returns:
        "" for a break that flags of an attempt would have avoided, or that Dynamo does not place.
    """
    reason: Any = getattr(graph_module, "compile_subgraph_reason", None)
    if not getattr(reason, "graph_break", False):
        return None
    is_avoided = any(flag in reason.reason for flag in CAPTURE_FLAGS.values)
    return "" if is_avoided else "".join(traceback.format_list(reason.user_stack or []))


def _given_up_at(text: str, skipped: re.Match[str]) -> str:
    """Return the "file:line" at which Dynamo gave up on a frame; that of its function where it does not say."""
    for reason, place in _failures(skipped[2]):
        if reason.startswith(text):
            _places.setdefault(text, place)
    return _places.get(text, f"{skipped[2]}:{skipped[3]}")


_places: dict[str, str] = {}
"""Where Dynamo gave up, by its reason: it forgets its metrics of earlier compilations."""


def last_failure(file: str) -> str:
    """Return the "file:line" at which Dynamo gave up last on a frame of a file's code; "" where it does not say."""
    return next((place for _, place in reversed(list(_failures(file)))), "")


def _failures(file: str) -> Iterator[tuple[str, str]]:
    """Yield why and at which "file:line" compilations of a file's code failed lately, in their order."""
    for metrics in getattr(_utils(), "get_compilation_metrics", tuple)():
        line = getattr(metrics, "fail_user_frame_lineno", None)
        if line and metrics.co_filename == file:
            yield str(metrics.fail_reason), f"{metrics.fail_user_frame_filename}:{line}"


def _brief(reason: str) -> str:
    """Return what Dynamo's reason says in its first line, its explanation, and its hints that set an option."""
    first, *lines = reason.strip().partition("\n\n")[0].splitlines()
    explanations = [line.partition("Explanation: ")[2] for line in lines if "Explanation: " in line]
    settings = [line.partition("Hint: ")[2] for line in lines if "Hint: " in line and _SETTING.search(line)]
    return " ".join([f"{first}:", *explanations, *settings]) if explanations or settings else first


_SETTING = re.compile(r"torch\._dynamo\.config\.\w+ = ")
_SKIPPED = re.compile(r"frame skipped: (\w+) \((.+) line (\d+)\)")


def _utils() -> Any:
    return importlib.import_module("torch._dynamo.utils")


def plain_compiler(inner_backend: str) -> Callable[..., Any]:
    """The compiler behind ours by its name, as torch.compile would find it."""
    compiler: Callable[..., Any] = torch._dynamo.lookup_backend(inner_backend)
    return compiler


def check_mode_switches() -> None:
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


def _check_graph_breaks() -> None:
    def breaks(value: torch.Tensor) -> torch.Tensor:
        value = value + 1
        torch._dynamo.graph_break(msg="asked by memfine_fx")
        return value

    stacks: list[str | None] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        stacks.append(break_behind(graph_module))
        return graph_module.forward

    counters = _utils().counters
    before = counters["frames"]["total"]
    torch.compile(breaks, backend=backend)(torch.zeros(1))
    _forget_backend(backend)
    reasons = [
        (kind, key)
        for kind in ("unimplemented", "graph_break")
        for key in counters[kind]
        if "asked by memfine_fx" in key
    ]
    for kind, key in reasons:
        del counters[kind][key]
    listed = _utils().graph_break_reasons
    listed[:] = [reason for reason in listed if "asked by memfine_fx" not in reason.reason]
    expect(bool(reasons) and counters["frames"]["total"] > before, "a graph break is not counted")
    expect(any(stacks), "a graph does not say where it was broken")
    failing = ("co_filename", "fail_reason", "fail_user_frame_filename", "fail_user_frame_lineno")
    metrics = _utils().get_compilation_metrics()
    expect(bool(metrics) and all(hasattr(metrics[-1], name) for name in failing), "failures have no place")


GRAPH_BREAKS = Feature(
    name="torch._dynamo.utils.counters",
    package="torch",
    purpose="Dynamo's reasons for layers that no compiled graph reads, in the report",
    seen=("2.11", "2.15"),
    fallback="The report names these layers without Dynamo's reason; TORCH_LOGS=graph_breaks shows it.",
    check=_check_graph_breaks,
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


def trace_artifact(name: str, payload: str) -> None:
    """A record in TORCH_TRACE, which tlparse shows with its compilation; nothing where tracing is off."""
    if not RECORDS.holds():
        return
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: payload)


def _check_traces() -> None:
    from torch._logging._internal import trace_structured

    parameters = inspect.signature(trace_structured).parameters
    expect({"metadata_fn", "payload_fn"} <= set(parameters), f"a record takes {', '.join(parameters)}")


RECORDS = Feature(
    name="torch._logging._internal.trace_structured",
    package="torch",
    purpose="regions and graphs in TORCH_TRACE",
    seen=("2.11", "2.15"),
    fallback="TORCH_TRACE holds no records of memfine_fx; MEMFINE_LOGS shows the same.",
    check=_check_traces,
)
