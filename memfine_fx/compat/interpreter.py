"""Reads from the interpreter itself: the model that runs, the compiled call under way, and all optimizers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from memfine_fx.compat.checks import Hook, expect

__all__ = [
    "COMPILED_CALLS",
    "FRAMES",
    "OBJECTS",
    "CompiledCall",
    "calling_code",
    "compiled_call",
    "every_optimizer",
    "running_model",
]


def running_model() -> torch.nn.Module | None:
    """The outermost module whose call is under way in this thread, None outside of any."""
    return _outermost_module() if FRAMES.holds() else None


def _outermost_module() -> torch.nn.Module | None:
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.nn.Module):
            found = caller
        frame = frame.f_back
    return found


class CompiledCall(NamedTuple):
    """A call under `torch.compile`.

    Args:
        function, args, kwargs: what is called.
        owner: the module whose method is being compiled; where graphs break that may be a part of the model.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owner: torch.nn.Module | None


def compiled_call() -> CompiledCall | None:
    """Return the innermost compiled call that is under way in this thread; None outside of any."""
    return _innermost_compiled_call() if COMPILED_CALLS.holds() else None


def _innermost_compiled_call() -> CompiledCall | None:
    frame: FrameType | None = sys._getframe(1)
    owner = None
    while frame is not None:
        is_of_dynamo = frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
        if is_of_dynamo and frame.f_code.co_name == "compile_wrapper":
            function = frame.f_locals["fn"]
            owner = owner or getattr(function, "__self__", None)
            is_module = isinstance(owner, torch.nn.Module)
            return CompiledCall(
                function, frame.f_locals["args"], frame.f_locals["kwargs"], owner if is_module else None
            )
        caller = frame.f_locals.get("self")
        owner = owner or (caller if isinstance(caller, torch.nn.Module) else None)
        frame = frame.f_back
    return None


def calling_code() -> CodeType:
    """The code that calls the function which asks."""
    return sys._getframe(2).f_code


def every_optimizer() -> list[torch.optim.Optimizer]:
    """Every optimizer of the process.

    NOTE: an optimizer is never registered anywhere, so the collector is asked, which takes a fraction of a second.
    """
    if not OBJECTS.holds():
        return []
    return [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]


_MOST_FROZEN = 10_000
"""Objects; `import torch` alone makes more than ten times as many."""


class _Probe(torch.nn.Module):
    def forward(self) -> torch.nn.Module | None:
        return _outermost_module()


def _check_frames() -> None:
    probe = _Probe()
    expect(probe() is probe, "the frame of a module's call does not hold the module")


def _check_objects() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    expect(gc.is_tracked(optimizer), "the collector does not know of optimizers")
    # Python 3.12 freezes a few hundred objects of its own at its start; what freezes an optimizer freezes all of torch.
    expect(gc.get_freeze_count() < _MOST_FROZEN, f"gc.freeze() hides {gc.get_freeze_count()} objects from it")


FRAMES = Hook(
    name="torch.nn.Module.__call__'s frame",
    host="torch",
    purpose="telling which of several models compiled by the backend's name is the one without regions",
    seen=("2.11", "2.15"),
    loss="Where several models are compiled by the backend's name, one of them without regions gets no warning of its "
    "own.",
    check=_check_frames,
)


def _check_compiled_calls() -> None:
    # No compilation: a check runs in a thread of its own, which would wait for the compilation that asks.
    from torch._dynamo.eval_frame import _TorchDynamoContext

    codes = [one for one in _TorchDynamoContext.__call__.__code__.co_consts if isinstance(one, CodeType)]
    wrapper = next((one for one in codes if one.co_name == "compile_wrapper"), None)
    expect(wrapper is not None, "_TorchDynamoContext.__call__ defines no compile_wrapper")
    assert wrapper is not None
    expect("fn" in wrapper.co_freevars, "compile_wrapper does not know its function as fn")
    expect({"args", "kwargs"} <= set(wrapper.co_varnames), "compile_wrapper does not take args and kwargs")


COMPILED_CALLS = Hook(
    name="torch._dynamo.eval_frame's compile_wrapper",
    host="torch",
    purpose="running a chunked layer as its author wrote it, on a few tokens of the call that is being compiled",
    seen=("2.13", "2.13"),
    loss="Chunked layers are not compared with the model's own code when they are first compiled; the report says so.",
    check=_check_compiled_calls,
)
OBJECTS = Hook(
    name="torch.optim.Optimizer among gc.get_objects()",
    host="torch",
    purpose="counting the state of optimizers that have not stepped yet",
    seen=("2.11", "2.15"),
    loss="Optimizers made before the first step are not seen, so a memory_budget is kept from the second step on, when "
    "their state is there.",
    check=_check_objects,
)
