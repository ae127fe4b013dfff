"""Reads from the interpreter itself: the model that runs, the compiled call under way, and all optimizers."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from memfine_fx.compat.checks import Feature, expect

__all__ = [
    "COMPILED_CALLS",
    "OBJECTS",
    "CompiledCall",
    "calling_code",
    "compiled_call",
    "every_optimizer",
    "running_model",
    "running_modules",
]


def running_modules() -> Iterator[torch.nn.Module]:
    """Yield the modules whose methods are under way in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.nn.Module):
            yield caller
        frame = frame.f_back


def running_model() -> torch.nn.Module | None:
    """Return the outermost module whose call is under way in this thread, None outside of any."""
    return next(iter(reversed(list(running_modules()))), None)


class CompiledCall(NamedTuple):
    """A call under `torch.compile`, as far as the code that is being compiled.

    Args:
        model: the module that was called; None where no module was.
        owner: the module whose method is being compiled, a part of the model where graphs break outside of it.
        method: name of that method; "" where only what follows a graph break in a method is compiled.
        args, kwargs: of that method.
    """

    model: torch.nn.Module | None
    owner: torch.nn.Module | None
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def compiled_call() -> CompiledCall | None:
    """Return the innermost compiled call that is under way in this thread; None outside of any."""
    return _innermost_compiled_call() if COMPILED_CALLS.holds() else None


def _innermost_compiled_call() -> CompiledCall | None:
    frame: FrameType | None = sys._getframe(1)
    compiled: Any = None
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if compiled is None and module == "torch._dynamo.convert_frame":
            compiled = frame.f_locals.get("frame")
        if module == "torch._dynamo.eval_frame" and frame.f_code.co_name == "compile_wrapper":
            model = getattr(frame.f_locals["fn"], "__self__", None)
            return None if compiled is None else _call_of(compiled, model if _is_module(model) else None)
        frame = frame.f_back
    return None


def _call_of(frame: Any, model: torch.nn.Module | None) -> CompiledCall:
    """Read the call from the frame that is being compiled, which has not run yet."""
    code, values = frame.f_code, frame.f_locals
    if code in _wrapper_codes():  # of a class of torch's, such as `nn.Sequential`, whose own methods are not compiled
        wrapped = values["fn"]
        owner = getattr(wrapped, "__self__", wrapped)
        is_call = _is_module(owner) and getattr(wrapped, "__name__", "forward") in ("forward", "__call__", "_call_impl")
        model = model or (owner if _is_module(owner) else None)
        return CompiledCall(model, owner, "forward" if is_call else "", values["args"], values["kwargs"])
    if str(frame.f_globals.get("__name__")).startswith("memfine_fx.compiler"):  # what calls a module as a whole
        return CompiledCall(model, values["self"], "forward", values["args"], values["kwargs"])
    named = inspect.getargs(code)
    owner = values.get(named.args[0]) if named.args else None
    names = [name for name in ("forward", code.co_name) if getattr(_function(owner, name), "__code__", None) is code]
    if not _is_module(owner) or not names:
        return CompiledCall(model, owner if _is_module(owner) else None, "", (), {})
    num_named = code.co_argcount  # `named.args` has those after the asterisk too
    args = [values[name] for name in named.args[1:num_named]] + list(values[named.varargs] if named.varargs else ())
    kwargs = {name: values[name] for name in named.args[num_named:]} | (values[named.varkw] if named.varkw else {})
    return CompiledCall(model, owner, names[0], tuple(args), kwargs)


def _wrapper_codes() -> list[CodeType]:
    """Code objects of the functions that `torch._dynamo.external_utils.wrap_inline` gives."""
    from torch._dynamo.external_utils import wrap_inline

    return [constant for constant in wrap_inline.__code__.co_consts if isinstance(constant, CodeType)]


def _is_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def _function(owner: object, name: str) -> Any:
    return getattr(getattr(owner, name, None), "__func__", None)


def calling_code() -> CodeType:
    """The code that calls the function which asks."""
    return sys._getframe(2).f_code


def every_optimizer() -> list[torch.optim.Optimizer]:
    """Every optimizer of the process.

    NOTE: an optimizer is never registered anywhere, so the collector is asked, which takes a fraction of a second.
    """
    if not OBJECTS.holds():
        return []
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.optim.Optimizer)]


_MOST_FROZEN = 10_000
"""Objects; `import torch` alone makes more than ten times as many."""


def _check_objects() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    expect(gc.is_tracked(optimizer), "the collector does not know of optimizers")
    # Python 3.12 freezes a few hundred objects of its own at its start; what freezes an optimizer freezes all of torch.
    expect(gc.get_freeze_count() < _MOST_FROZEN, f"gc.freeze() hides {gc.get_freeze_count()} objects from it")


def _check_compiled_calls() -> None:
    # No compilation: a check runs in a thread of its own, which would wait for the compilation that asks.
    from torch._dynamo.eval_frame import _TorchDynamoContext

    codes = [constant for constant in _TorchDynamoContext.__call__.__code__.co_consts if isinstance(constant, CodeType)]
    wrapper = next((code for code in codes if code.co_name == "compile_wrapper"), None)
    expect(wrapper is not None, "_TorchDynamoContext.__call__ defines no compile_wrapper")
    assert wrapper is not None
    expect("fn" in wrapper.co_freevars, "compile_wrapper does not know its function as fn")
    from torch._dynamo import convert_frame

    arguments = inspect.signature(convert_frame._compile).parameters
    expect("frame" in arguments, "torch._dynamo.convert_frame._compile does not take a frame")
    names = {name for code in _wrapper_codes() for name in (*code.co_freevars, *code.co_varnames)}
    expect({"fn", "args", "kwargs"} <= names, f"wrap_inline calls by {sorted(names)}")


COMPILED_CALLS = Feature(
    name="torch._dynamo.eval_frame's compile_wrapper",
    package="torch",
    purpose="running a chunked layer as its author wrote it, on a few tokens of the call that is being compiled",
    seen=("2.13", "2.13"),
    fallback="Chunked layers are not compared with the model's own code when they are first compiled; the report says "
    "so.",
    check=_check_compiled_calls,
)
OBJECTS = Feature(
    name="torch.optim.Optimizer among gc.get_objects()",
    package="torch",
    purpose="counting the state of optimizers that have not stepped yet",
    seen=("2.11", "2.15"),
    fallback="Optimizers made before the first step are not seen, so a memory_budget holds from the second step on, "
    "when their state is there.",
    check=_check_objects,
)
