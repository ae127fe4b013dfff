"""Where calls of an optimized model arrive: `model(...)`, `model.forward(...)`, and the calls of its backbone.

Wrappers do not all call the model itself. Some call `model.forward`; some put a forward of their own in its place that
calls the backbone alone (the part below the head) and computes the loss otherwise. So beside the place of the compiled
call a *stand-in* is the `forward` of the model and of each backbone, as an attribute of the instance:

    arrives at               runs
    model(...)               the compiled call of the model, hooks included
    model.forward(...)       the compiled forward of the model; whoever calls it has run the hooks
    backbone.forward(...)    the compiled forward of the backbone; `backbone(...)` gets there through its own hooks

Inside a call of the model all of these run what was written, so that there is one compiled call and no second one in
it: in eager code of the same thread by a list of what is under way, in what Dynamo traces by a flag that it guards. A
model inside of code that somebody else compiles stays out of their graph, compiled by us.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = [
    "Arrivals",
    "as_written",
    "backbones",
    "is_compiled_inside",
    "is_own",
    "place_of",
    "replaced_by",
    "running",
    "stand_in",
    "state_as_written",
]

_INSIDE = "_memfine_forward"
_STANDS = "_memfine_stands"
_NUMBER = "_memfine_number"
_num_running = 0
_is_any_running = False
_lock = threading.Lock()


class _UnderWay(threading.local):
    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []


_under_way = _UnderWay()


@contextlib.contextmanager
def running(model: torch.nn.Module) -> Iterator[None]:
    """A call of a model is under way in this thread: its parts run as they are written, in one graph."""
    global _num_running, _is_any_running
    _under_way.models.append(model)
    with _lock:
        _num_running += 1
        _is_any_running = True
    try:
        yield
    finally:
        with _lock:
            _num_running -= 1
            _is_any_running = _num_running > 0
        _under_way.models.pop()


def is_compiled_inside() -> bool:
    """Whether Dynamo traces this for a call of ours, as a constant of what it traces."""
    return torch.compiler.is_dynamo_compiling() and _is_any_running


def backbones(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The parts below a model that hold most of its modules, each inside the one before; containers end the list."""
    found: list[torch.nn.Module] = []
    largest, num_modules = _largest_part(model)
    while largest is not None and not _is_container(largest) and 2 * num_modules > sum(1 for _ in model.modules()):
        found.append(largest)
        largest, num_modules = _largest_part(largest)
    return found


def _largest_part(module: torch.nn.Module) -> tuple[torch.nn.Module | None, int]:
    sizes = [(sum(1 for _ in child.modules()), child) for child in module.children()]
    size, largest = max(sizes, key=lambda one: one[0], default=(0, None))
    return largest, size


def _is_container(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) or not any(True for _ in module.children())


class Arrivals(Protocol):
    """The call of an optimized model, as stand-ins know it."""

    model: torch.nn.Module

    def arrive(self, place: int, *args: Any, **kwargs: Any) -> Any:
        """Run one of its compiled calls; kept out of graphs of others."""


@dataclass
class Stand:
    """What a stand-in finds at its module, where copies of the module find their own.

    Args:
        call: of the optimized model.
        place: which of its compiled calls.
        theirs: the `forward` that somebody had set on the instance before, None for that of the class.
    """

    call: Arrivals
    place: int
    theirs: Any


def stand_in(module: torch.nn.Module, call: Arrivals, place: int) -> Callable[..., Any]:
    """A method for the place of a module's `forward`, and its record; not put there yet.

    Where one of ours stands, the new one has its record. Where somebody has wrapped ours, the new one stands before
    theirs, with a record of its own.
    """
    stands: list[Stand] = vars(module).setdefault(_STANDS, [])
    there = vars(module).get("forward")
    number = _number(there)
    if number is None:
        stands.append(Stand(call, place, there))
        number = len(stands) - 1
    else:
        stands[number] = Stand(call, place, stands[number].theirs)
    return types.MethodType(_function(module, number, stands[number].theirs), module)


def _function(module: torch.nn.Module, number: int, theirs: Any) -> Callable[..., Any]:
    """The stand-in with this record, with the signature of what it stands before.

    NOTE: no `__wrapped__` unless theirs has one: accelerate follows it until it finds the forward that it wrapped.
    """

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        one: Stand = self._memfine_stands[number]  # type: ignore[index, assignment]  # a list that nobody else names
        is_inside = _is_any_running if torch.compiler.is_dynamo_compiling() else _is_under_way(one.call.model)
        if not is_inside:
            return one.call.arrive(one.place, *args, **kwargs)
        installed = getattr(self, _INSIDE, None)
        if installed is not None:
            return installed(*args, **kwargs)
        if one.theirs is not None:
            return one.theirs(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    described: Any = forward
    written: Any = type(module).forward
    for name in ("__doc__", "__module__", "__qualname__"):
        setattr(described, name, getattr(theirs, name, None) or getattr(written, name))
    if hasattr(theirs, "__wrapped__"):
        described.__wrapped__ = theirs.__wrapped__
    described.__signature__ = _signature(written, theirs)
    setattr(described, _NUMBER, number)
    return forward


def _is_under_way(model: torch.nn.Module) -> bool:
    return any(one is model for one in _under_way.models)


def _signature(written: Callable[..., Any], theirs: Any) -> inspect.Signature:
    """Of a function that is bound to its module."""
    if theirs is None:
        return inspect.signature(written)
    kept = [one for one in inspect.signature(theirs).parameters.values() if one.name != "self"]
    return inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *kept])


def _number(forward: object) -> int | None:
    """Which record a stand-in of ours reads, None of any other forward."""
    number: int | None = getattr(getattr(forward, "__func__", None), _NUMBER, None)
    return number


def as_written(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward that a module would run without us."""
    forward: Callable[..., Any] = module.forward
    number = _number(forward)
    if number is None:
        return forward
    theirs: Callable[..., Any] | None = vars(module)[_STANDS][number].theirs
    return types.MethodType(type(module).forward, module) if theirs is None else theirs


def is_own(module: torch.nn.Module, name: str) -> bool:
    """Whether a module has an attribute of this name for itself that somebody else has set."""
    return name in vars(module) and not (name == "forward" and _number(vars(module)[name]) is not None)


def place_of(module: torch.nn.Module, name: str) -> str:
    """The attribute to set for a method that is to run inside of calls: behind the stand-in where one stands."""
    return _INSIDE if name == "forward" and _number(vars(module).get(name)) is not None else name


def replaced_by(model: torch.nn.Module) -> object | None:
    """What stands in the place of the stand-in now, None where that stands."""
    forward = vars(model).get("forward")
    return None if _number(forward) is not None else forward or type(model).forward


def state_as_written(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A module's state for its copies, without a stand-in: what it stands before is put back."""
    rest = {name: value for name, value in state.items() if name not in (_STANDS, _INSIDE)}
    number = _number(state.get("forward"))
    if number is None:
        return rest
    theirs = state[_STANDS][number].theirs
    del rest["forward"]
    return rest if theirs is None else rest | {"forward": theirs}
