"""Save and restore the state that running a model changes besides its result.

This state consists of generators of random numbers (torch's on the host and on the accelerator, Python's, numpy's), the
attributes of modules (buffers and hooks among them), lists, dictionaries, sets and plain objects in these attributes,
closures and globals of the modules' methods and hooks, and the contents of buffers and of other tensors found there.

NOTE: contents are written back only where they differ. Writing moves a tensor's version, and a graph of the user that
saved an unchanged buffer would refuse its backward. The version alone does not tell what differs: batch norm writes its
running statistics without moving it.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch

from memfine_fx.compat.nn import hooks_of, own_buffers

__all__ = ["Contents", "Generators", "ModelState", "functions_of", "named_globals"]

_CONTAINERS = (
    list,
    dict,
    set,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
)
"""Exactly these: a subclass may do anything when it is read."""
_MOST_LEVELS = 4
"""How deep containers and objects are looked into, from a module's attribute on."""


class Generators:
    """The state of torch's generators, the host's and the accelerator's."""

    def __init__(self) -> None:
        # A tensor of 5,056 bytes would live as long as a call that may have to be undone, and in no plan.
        state = torch.get_rng_state()
        self._host = ctypes.string_at(state.data_ptr(), state.nbytes)
        self._device = _device_generators()

    @property
    def of_device(self) -> Any:
        """State of the accelerator's generators, as its module gives it; None where it has not been used yet."""
        return None if self._device is None else self._device[1]

    def restore(self) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(self._host), dtype=torch.uint8))
        if self._device is not None:
            put_back, state = self._device
            put_back(state)


def _device_generators() -> tuple[Callable[[Any], object], Any] | None:
    """How to put the accelerator's generators back, and their state; None where it has not been used yet."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    if module is None or not getattr(module, "is_initialized", lambda: True)():
        return None
    if hasattr(module, "get_rng_state_all"):
        return module.set_rng_state_all, module.get_rng_state_all()
    return module.set_rng_state, module.get_rng_state()


class _HostGenerators:
    """Python's generator, and numpy's where it is loaded."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        self._numpy_state = None if self._numpy is None else self._numpy.get_state()

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy_state is not None:
            self._numpy.set_state(self._numpy_state)


class Contents:
    """Copies of the contents of some tensors, to restore them.

    Args:
        tensors: copied when this object is created.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, before in self._differing():
                with torch.inference_mode(tensor.is_inference()):
                    tensor.copy_(before)

    def changed(self) -> list[torch.Tensor]:
        """Tensors that were written to since, or may have been."""
        return [tensor for tensor, _ in self._differing()]

    def _differing(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(tensor, before) for tensor, before in self._kept if not _has_same_bits(tensor, before)]


def _has_same_bits(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """False where that cannot be asked: a tensor without data, or one that is spread over ranks."""
    if type(before) is not torch.Tensor or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return torch.equal(*(operand.detach().contiguous().reshape(-1).view(torch.uint8) for operand in (tensor, before)))


class _Containers:
    """Notes the items of lists, dictionaries, sets and deques, and the attributes of plain objects, to restore them.

    Args:
        values: where the search begins. Modules, classes, functions and tensors are not looked into.
    """

    def __init__(self, values: Iterable[object]) -> None:
        self.tensors: list[torch.Tensor] = []
        """Tensors that were found, parameters excepted."""
        self._before: list[tuple[Any, Any]] = []
        self.held: set[int] = set()
        """Ids of the containers and objects that are put back."""
        visited: set[int] = set()
        level = list(values)
        for _ in range(_MOST_LEVELS):
            unvisited = [value for value in level if id(value) not in visited]
            visited.update(map(id, unvisited))
            level = [part for value in unvisited for part in self._note(value)]

    def restore(self) -> None:
        for container, before in self._before:
            if _has_same_items(container, before):
                continue
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                (container.extend if isinstance(container, collections.deque) else container.update)(before)

    def _note(self, value: Any) -> Iterable[Any]:
        """Remember what a value holds, and return it."""
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                self.tensors.append(value)
            return ()
        if isinstance(value, (tuple, frozenset)):
            return value
        if type(value) not in _CONTAINERS and not _is_plain_object(value):
            return ()
        self.held.add(id(value))
        if type(value) not in _CONTAINERS:
            value = vars(value)
        before = dict(value) if isinstance(value, dict) else list(value)
        self._before.append((value, before))
        return before.values() if isinstance(before, dict) else before


def _has_same_items(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(before, dict):
        return list(container) == list(before) and all(container[key] is value for key, value in before.items())
    return all(value is old for value, old in zip(container, before, strict=True))


def _is_plain_object(value: object) -> bool:
    """Whether it is an object with attributes, of a class that comes with neither Python nor torch."""
    opaque = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, list, dict, set, tuple)
    return hasattr(value, "__dict__") and not isinstance(value, opaque) and not _is_of_host(type(value))


def _is_of_host(owner: Any) -> bool:
    """Whether a class or function is of Python's library, of torch or of memfine_fx.

    A logger, for example, leads to all others: what they note meanwhile is theirs.
    """
    name = str(getattr(owner, "__module__", "")).partition(".")[0]
    return name in ("torch", "memfine_fx") or name in sys.stdlib_module_names


def functions_of(model: torch.nn.Module) -> list[types.FunctionType]:
    """Functions written in Python that a call of a model may run: its modules' methods and hooks, torch's own excepted.

    What these call in turn is not followed.
    """
    functions: dict[int, types.FunctionType] = {}
    for module_class in dict.fromkeys(map(type, model.modules())):
        for owner in module_class.__mro__:
            if not _is_of_host(owner):
                functions |= {
                    id(value): value for value in vars(owner).values() if isinstance(value, types.FunctionType)
                }
    for module in model.modules():
        for hook in hooks_of(module):
            function = hook.func if isinstance(hook, functools.partial) else hook
            function = getattr(function, "__func__", function)
            if isinstance(function, types.FunctionType) and not _is_of_host(function):
                functions[id(function)] = function
    return list(functions.values())


def named_globals(functions: Iterable[types.FunctionType]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Global variables that functions read or bind, as (the module's variables, name, value).

    Modules, classes and functions are left out.
    """
    visited: set[tuple[int, str]] = set()
    for function in functions:
        for name in _names_in(function.__code__):
            key = id(function.__globals__), name
            if key in visited or name not in function.__globals__:
                continue
            visited.add(key)
            value = function.__globals__[name]
            if not isinstance(value, (types.ModuleType, type)) and not callable(value):
                yield function.__globals__, name, value


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


class _Variables:
    """Notes the values of variables in closures and of globals of functions, to bind them again."""

    def __init__(self, functions: Iterable[types.FunctionType]) -> None:
        functions = list(functions)
        cells = [cell for function in functions for cell in function.__closure__ or ()]
        self._cells = [(cell, value) for cell in cells for value in _contents(cell)]
        self._globals = list(named_globals(functions))

    @property
    def values(self) -> list[Any]:
        return [value for _, value in self._cells] + [value for _, _, value in self._globals]

    def holds(self, variable: object) -> bool:
        """Whether a cell, or a global of this name, is noted."""
        return any(variable is cell for cell, _ in self._cells) or any(
            isinstance(variable, str) and variable == name for _, name, _ in self._globals
        )

    def restore(self) -> None:
        for cell, value in self._cells:
            if not any(content is value for content in _contents(cell)):
                cell.cell_contents = value
        for variables, name, value in self._globals:
            if variables.get(name) is not value:
                variables[name] = value


def _contents(cell: types.CellType) -> list[Any]:
    """Return the value of a variable of a closure, as a list of one; an empty list where it is not bound yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


class ModelState:
    """The state that a call of a model may change, saved when this object is created.

    Args:
        model: saved with all its modules.
        tensors: further tensors that the call may write into, its inputs.
        objects: further Python objects that the call may change.
        attributes: "all" saves every attribute of the modules, the objects in them and the variables of functions.
            "buffers" saves buffers alone: a call that runs again at once must keep what the model sets up only once,
            in its first call.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: Iterable[torch.Tensor] = (),
        *,
        objects: Iterable[object] = (),
        attributes: Literal["all", "buffers"] = "all",
    ) -> None:
        self._generators, self._host_generators = Generators(), _HostGenerators()
        reads_all = attributes == "all"
        self._variables = _Variables(functions_of(model) if reads_all else ())
        roots = [vars(module) if reads_all else own_buffers(module) for module in model.modules()]
        self._containers = _Containers([*roots, *self._variables.values, *objects])
        self._modules = {id(module) for module in model.modules()}
        tensors_by_id = {id(tensor): tensor for tensor in (*model.buffers(), *self._containers.tensors, *tensors)}
        self._contents = Contents(tensors_by_id.values())

    def restore(self) -> None:
        self._variables.restore()
        self._containers.restore()
        self._contents.restore()
        self._host_generators.restore()
        self._generators.restore()

    def holds(self, changed: object) -> bool:
        """Whether a Python object, a variable's cell or a global's name is put back."""
        return id(changed) in self._modules | self._containers.held or self._variables.holds(changed)

    def changed(self) -> list[torch.Tensor]:
        """Buffers and named tensors that were written to since, or may have been."""
        return self._contents.changed()
