"""Results of searching a model, recomputed when its modules change: adapters may be added after `optimize`.

Walking thousands of modules in each call would cost milliseconds. torch calls a hook for every module that is
registered in another, so a model is walked again only after a module was registered anywhere, and searched again only
if that changed this model.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch.nn.modules.module import register_module_module_registration_hook

__all__ = ["FoundAgain", "may_hold_experts"]

FoundT = TypeVar("FoundT")
_lock = threading.Lock()
_num_set = 0


class FoundAgain(Generic[FoundT]):
    """The result of `find` for a model, recomputed when the modules of the model change.

    Args:
        model: its modules are compared by identity and class.
        find: called at once, and in the first `current` after a change.
    """

    def __init__(self, model: torch.nn.Module, find: Callable[[torch.nn.Module], FoundT]) -> None:
        _listen()
        self._model, self._find = model, find
        self._num_set = _num_set
        self._modules = _modules(model)
        self._found = find(model)

    def current(self) -> FoundT:
        """Return the result of `find` for the model as it is now.

        Modules that were removed without another one being registered are not noticed.
        """
        if self._num_set != _num_set:
            with _lock:
                self._num_set = _num_set
                modules = _modules(self._model)
                if modules != self._modules:
                    self._modules, self._found = modules, self._find(self._model)
        return self._found


def may_hold_experts(module: torch.nn.Module) -> bool:
    """Return whether a module has a list of modules or of parameters, or a parameter with an entry for each expert."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
    has_list = any(isinstance(part, lists) and len(part) > 1 for part in module.modules())
    return has_list or any(parameter.ndim > 2 for parameter in module.parameters())


def _modules(model: torch.nn.Module) -> list[tuple[int, type]]:
    return [(id(module), type(module)) for module in model.modules()]


@functools.cache
def _listen() -> None:
    register_module_module_registration_hook(_note_set)


def _note_set(module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    """Count what is set; containers that traced code makes are no part of a model, and a count would be a guard."""
    global _num_set
    if not torch.compiler.is_dynamo_compiling():
        _num_set += 1
