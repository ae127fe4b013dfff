"""Where calls of an optimized model arrive: `model(...)`, `model.forward(...)`, and the calls of its backbone.

Wrappers do not all call the model itself. Some call `model.forward`; some put a forward of their own in its place that
calls the backbone alone (the part below the head) and computes the loss otherwise. So beside the place of the compiled
call a *stand-in* is the `forward` of the model and of each backbone, as an attribute of the instance:

    arrives at               runs
    model(...)               the compiled call of the model, hooks included
    model.forward(...)       the compiled forward of the model; whoever calls it has run the hooks
    backbone.forward(...)    the compiled forward of the backbone; `backbone(...)` gets there through its own hooks

For the time of a call of the model its stand-ins are taken out, so that there is one compiled call and no second one in
it, and Dynamo traces the forwards as written: with their own names for the inputs and their own guards. Where somebody
has wrapped a stand-in, theirs stays, with ours in it. That one runs what was written: in eager code of the same thread
by a list of what is under way, in what Dynamo traces by a flag that it guards. A model inside of code that somebody
else compiles stays out of their graph, compiled by us.

NOTE: a thread that calls `model.forward` itself while another is in a call of the same model finds no stand-in, and
runs what was written without us; `model(...)` does not need one.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

__all__ = [
    "Arrivals",
    "StandIns",
    "as_written",
    "backbones",
    "behind",
    "is_compiled_inside",
    "is_own",
    "replaced_by",
    "stand_in",
    "state_as_written",
]

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
def _running(model: torch.nn.Module) -> Iterator[None]:
    """A call of a model is under way in this thread."""
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
    """The parts below a model that hold most of its modules and parameters, each inside the one before.

    Containers end the list. A layer's shared expert may have most of its modules, but not of its parameters.
    """
    found: list[torch.nn.Module] = []
    inside = _largest_part(model)
    while inside is not None and not _is_container(inside) and _is_most(inside, model):
        found.append(inside)
        inside = _largest_part(inside)
    return found


def _largest_part(module: torch.nn.Module) -> torch.nn.Module | None:
    return max(module.children(), key=_num_modules, default=None)


def _num_modules(module: torch.nn.Module) -> int:
    return sum(1 for _ in module.modules())


def _is_most(part: torch.nn.Module, whole: torch.nn.Module) -> bool:
    sizes = [sum(0 if is_lazy(one) else one.numel() for one in module.parameters()) for module in (part, whole)]
    return 2 * _num_modules(part) > _num_modules(whole) and 2 * sizes[0] >= sizes[1]


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


@dataclass
class _Stands:
    """All stand-ins of a module.

    Args:
        records: of each, by its number.
        num_calls: that are under way without the foremost.
        taken: the foremost while it is out, and what stands there in its place.
    """

    records: list[Stand] = field(default_factory=list)
    num_calls: int = 0
    taken: tuple[Any, Any] | None = None


class StandIns:
    """The stand-ins of a model and of models in it, which are taken out for the time of calls.

    Args:
        model: searched once; `structure.FoundAgain` searches again when modules were set in it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parts = [(module, vars(module)[_STANDS]) for module in model.modules() if _STANDS in vars(module)]

    @contextlib.contextmanager
    def taken_out(self) -> Iterator[None]:
        """A call of the model is under way: its parts run as they are written, in one graph.

        NOTE: nothing of ours is called while they are put back, so that an interrupt there finds each in its place.
        """
        with _running(self._model):
            entered: list[tuple[torch.nn.Module, _Stands]] = []
            try:
                with _lock:
                    for module, stands in self._parts:
                        entered.append((module, stands))
                        stands.num_calls += 1
                        if stands.num_calls == 1:
                            _take_out(module, stands)
                yield
            finally:
                with _lock:
                    for module, stands in entered:
                        stands.num_calls -= 1
                        if stands.taken is None or stands.num_calls:
                            continue
                        forward, theirs = stands.taken
                        stands.taken = None
                        if vars(module).get("forward") is theirs:  # else one was set meanwhile, which stays
                            vars(module)["forward"] = forward


def _take_out(module: torch.nn.Module, stands: _Stands) -> None:
    attributes = vars(module)
    number = _number(attributes.get("forward"))
    if number is None:
        return
    theirs = stands.records[number].theirs
    stands.taken = attributes.pop("forward"), theirs
    if theirs is not None:
        attributes["forward"] = theirs


def stand_in(module: torch.nn.Module, call: Arrivals, place: int) -> Callable[..., Any]:
    """A method for the place of a module's `forward`, and its record; not put there yet.

    Where one of ours stands, the new one has its record. Where somebody has wrapped ours, the new one stands before
    theirs, with a record of its own.
    """
    stands: list[Stand] = vars(module).setdefault(_STANDS, _Stands()).records
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
        stands: Any = self._memfine_stands
        one: Stand = stands.records[number]
        is_inside = _is_any_running if torch.compiler.is_dynamo_compiling() else _is_under_way(one.call.model)
        if not is_inside:
            return one.call.arrive(one.place, *args, **kwargs)
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
    return forward if _number(forward) is None else behind(forward)


def behind(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """The forward that runs inside of calls that arrive at a stand-in: while it is taken out, what stands there."""
    module: torch.nn.Module = stand_in.__self__  # type: ignore[attr-defined]  # a method
    stands: _Stands = vars(module)[_STANDS]
    number = _number(stand_in)
    assert number is not None, "a stand-in knows its record"
    if stands.taken is not None and _number(stands.taken[0]) == number:
        return module.forward
    theirs: Callable[..., Any] | None = stands.records[number].theirs
    return types.MethodType(type(module).forward, module) if theirs is None else theirs


def is_own(module: torch.nn.Module, name: str) -> bool:
    """Whether a module has an attribute of this name for itself that somebody else has set."""
    there = vars(module).get(name)
    number = _number(there) if name == "forward" else None
    return there is not None if number is None else vars(module)[_STANDS].records[number].theirs is not None


def replaced_by(model: torch.nn.Module) -> object | None:
    """What stands in the place of the stand-in now, None where that stands."""
    forward = vars(model).get("forward")
    return None if _number(forward) is not None else forward or type(model).forward


def state_as_written(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A module's state for its copies, without a stand-in: what it stands before is put back."""
    rest = {name: value for name, value in state.items() if name != _STANDS}
    number = _number(state.get("forward"))
    if number is None:
        return rest
    theirs = state[_STANDS].records[number].theirs
    del rest["forward"]
    return rest if theirs is None else rest | {"forward": theirs}
