"""Forward wrappers, which route calls of an optimized model and of its backbones to compiled code.

Code that wraps a model does not always call the model itself. Some calls `model.forward`. Some replaces it by a forward
that calls only the backbone (the part below the head) and computes the loss differently. So `optimize` sets a forward
wrapper as the instance attribute `forward` of the model and of each backbone, in addition to the model's compiled call:

    call                     runs
    model(...)               the compiled call of the model, hooks included
    model.forward(...)       the compiled forward of the model; the caller has run the hooks
    backbone.forward(...)    the compiled forward of the backbone; `backbone(...)` gets there through its own hooks

During a call of the model its forward wrappers are removed. So no compiled call runs inside another one, and Dynamo
traces the original forwards, with their own input names and guards. If other code has wrapped a forward wrapper, that
wrapper stays, with the forward wrapper inside it, and this forward wrapper then runs the original forward. In eager
code it knows that a call is running from a list of the thread's running models; in code that Dynamo traces, from a flag
that Dynamo guards. If other code compiles a function that calls the model, the model stays out of that graph and runs
its own compiled code.

NOTE: a thread that calls `model.forward` while another thread runs a call of the same model finds no forward wrapper
and runs the original forward, not the compiled one. `model(...)` does not need a forward wrapper.
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
    "DispatchedCalls",
    "ForwardWrappers",
    "backbones",
    "behind",
    "is_compiled_inside",
    "is_own",
    "original_forward",
    "replaced_by",
    "state_as_written",
    "wrap_forward",
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
    parts: list[torch.nn.Module] = []
    inside = _largest_part(model)
    while inside is not None and not _is_container(inside) and _is_most(inside, model):
        parts.append(inside)
        inside = _largest_part(inside)
    return parts


def _largest_part(module: torch.nn.Module) -> torch.nn.Module | None:
    return max(module.children(), key=_num_modules, default=None)


def _num_modules(module: torch.nn.Module) -> int:
    return sum(1 for _ in module.modules())


def _is_most(part: torch.nn.Module, whole: torch.nn.Module) -> bool:
    sizes = [
        sum(0 if is_lazy(parameter) else parameter.numel() for parameter in module.parameters())
        for module in (part, whole)
    ]
    return 2 * _num_modules(part) > _num_modules(whole) and 2 * sizes[0] >= sizes[1]


def _is_container(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) or not any(True for _ in module.children())


class DispatchedCalls(Protocol):
    """The call of an optimized model, as forward wrappers know it."""

    model: torch.nn.Module

    def dispatch(self, place: int, *args: Any, **kwargs: Any) -> Any:
        """Run one of its compiled calls; other compiled code breaks its graph here."""


@dataclass
class ForwardWrapper:
    """The record of one forward wrapper, stored at its module so that a copy of the module has its own.

    Args:
        call: the call of the optimized model.
        place: index of the compiled call that the forward wrapper runs.
        user_forward: the `forward` that other code had set on the instance before; None for the forward of the class.
    """

    call: DispatchedCalls
    place: int
    user_forward: Any


@dataclass
class _Stands:
    """All forward wrappers of a module.

    Args:
        records: of each, by its number.
        num_calls: that are under way without the foremost.
        removed: the foremost wrapper while calls run without it, and the forward that is in its place.
    """

    records: list[ForwardWrapper] = field(default_factory=list)
    num_calls: int = 0
    removed: tuple[Any, Any] | None = None


class ForwardWrappers:
    """The forward wrappers of a model and of models in it, which are taken out for the time of calls.

    Args:
        model: searched once; `structure.FoundAgain` searches again when modules were set in it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parts = [(module, vars(module)[_STANDS]) for module in model.modules() if _STANDS in vars(module)]

    @contextlib.contextmanager
    def unpatched(self) -> Iterator[None]:
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
                        if stands.removed is None or stands.num_calls:
                            continue
                        forward, original_forward = stands.removed
                        stands.removed = None
                        if vars(module).get("forward") is original_forward:  # else one was set meanwhile, which stays
                            vars(module)["forward"] = forward


def _take_out(module: torch.nn.Module, stands: _Stands) -> None:
    attributes = vars(module)
    number = _number(attributes.get("forward"))
    if number is None:
        return
    original_forward = stands.records[number].user_forward
    stands.removed = attributes.pop("forward"), original_forward
    if original_forward is not None:
        attributes["forward"] = original_forward


def wrap_forward(module: torch.nn.Module, call: DispatchedCalls, place: int) -> Callable[..., Any]:
    """A method for the place of a module's `forward`, and its record; not put there yet.

    Where one of ours stands, the new one has its record. Where somebody has wrapped ours, the new one stands before
    that wrapper, with a record of its own.
    """
    stands: list[ForwardWrapper] = vars(module).setdefault(_STANDS, _Stands()).records
    current = vars(module).get("forward")
    number = _number(current)
    if number is None:
        stands.append(ForwardWrapper(call, place, current))
        number = len(stands) - 1
    else:
        stands[number] = ForwardWrapper(call, place, stands[number].user_forward)
    return types.MethodType(_function(module, number, stands[number].user_forward), module)


def _function(module: torch.nn.Module, number: int, user_forward: Any) -> Callable[..., Any]:
    """The forward wrapper with this record, with the signature of what it stands before.

    NOTE: no `__wrapped__` unless `user_forward` has one: accelerate follows it until it finds the forward that it
        wrapped.
    """

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        stands: Any = self._memfine_stands
        record: ForwardWrapper = stands.records[number]
        is_inside = _is_any_running if torch.compiler.is_dynamo_compiling() else _is_under_way(record.call.model)
        if not is_inside:
            return record.call.dispatch(record.place, *args, **kwargs)
        if record.user_forward is not None:
            return record.user_forward(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    described: Any = forward
    written: Any = type(module).forward
    for name in ("__doc__", "__module__", "__qualname__"):
        setattr(described, name, getattr(user_forward, name, None) or getattr(written, name))
    if hasattr(user_forward, "__wrapped__"):
        described.__wrapped__ = user_forward.__wrapped__
    described.__signature__ = _signature(written, user_forward)
    setattr(described, _NUMBER, number)
    return forward


def _is_under_way(model: torch.nn.Module) -> bool:
    return any(running is model for running in _under_way.models)


def _signature(written: Callable[..., Any], user_forward: Any) -> inspect.Signature:
    """Return the signature of a forward wrapper, with the `self` that binding it to its module takes away.

    It is that of `written` where `user_forward` is None, else `self` and the parameters of `user_forward`.
    """
    if user_forward is None:
        return inspect.signature(written)
    parameters = [
        parameter for parameter in inspect.signature(user_forward).parameters.values() if parameter.name != "self"
    ]
    return inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *parameters])


def _number(forward: object) -> int | None:
    """Which record a forward wrapper of ours reads, None of any other forward."""
    number: int | None = getattr(getattr(forward, "__func__", None), _NUMBER, None)
    return number


def original_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """The forward that a module would run without us."""
    forward: Callable[..., Any] = module.forward
    return forward if _number(forward) is None else behind(forward)


def behind(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward that runs inside of calls that a forward wrapper dispatches."""
    module: torch.nn.Module = wrapper.__self__  # type: ignore[attr-defined]  # a method
    stands: _Stands = vars(module)[_STANDS]
    number = _number(wrapper)
    assert number is not None, "a forward wrapper knows its record"
    if stands.removed is not None and _number(stands.removed[0]) == number:
        return module.forward
    original_forward: Callable[..., Any] | None = stands.records[number].user_forward
    return types.MethodType(type(module).forward, module) if original_forward is None else original_forward


def is_own(module: torch.nn.Module, name: str) -> bool:
    """Whether a module has an attribute of this name for itself that somebody else has set."""
    value = vars(module).get(name)
    number = _number(value) if name == "forward" else None
    return value is not None if number is None else vars(module)[_STANDS].records[number].user_forward is not None


def replaced_by(model: torch.nn.Module) -> object | None:
    """Return the `forward` that has replaced a model's forward wrapper; None if the wrapper is in its place."""
    forward = vars(model).get("forward")
    return None if _number(forward) is not None else forward or type(model).forward


def state_as_written(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A module's state for its copies, without a forward wrapper: what it stands before is put back."""
    rest = {name: value for name, value in state.items() if name != _STANDS}
    number = _number(state.get("forward"))
    if number is None:
        return rest
    original_forward = state[_STANDS].records[number].user_forward
    del rest["forward"]
    return rest if original_forward is None else rest | {"forward": original_forward}
