"""Results of searching a model, recomputed when its modules change: adapters may be added after `optimize`.

Walking thousands of modules in each call would cost milliseconds. torch calls a hook for every module that is
registered in another, so a model is walked again only after a module was registered anywhere, and searched again only
if that changed this model.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Set
from typing import Generic, TypeVar

import torch
from torch.nn.modules.module import register_module_module_registration_hook

__all__ = ["FoundAgain", "may_hold_experts", "moe_layers"]

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
    has_list = any(isinstance(part, _LISTS) and len(part) > 1 for part in module.modules())
    return has_list or any(parameter.ndim > 2 for parameter in module.parameters())


def moe_layers(model: torch.nn.Module) -> list[str]:
    """Return the paths of modules that hold experts and a router, as the shapes of their parameters show.

    Experts are E modules or parameters of the same shapes in a list, or parameters [E,...] of three or more dimensions.
    The layer is the module that holds them, or one of the two around it: the innermost one that also holds a matrix
    with E rows or columns. A router without such a matrix (hash routing) is not seen.

    A matrix in another such layer is no router of what lies around it: E equal blocks of a vision tower are no experts
    of the model that has the tower and MoE layers.
    """
    modules = dict(model.named_modules())
    layers: dict[str, list[tuple[int, set[int]]]] = {}
    for path, module in modules.items():
        for num_experts, experts in _experts_in(module):
            parts = path.split(".") if path else []
            around = [".".join(parts[: len(parts) - levels]) for levels in range(min(2, len(parts)) + 1)]
            inside = {id(parameter) for parameter in experts}
            layer = next((each for each in around if _has_router(modules[each], num_experts, inside)), None)
            if layer is not None:
                layers.setdefault(layer, []).append((num_experts, inside))
    of_inner: dict[str, set[int]] = {}
    for path in sorted(layers, key=lambda path: path.count("."), reverse=True):
        other = set().union(*(ids for inner, ids in of_inner.items() if not path or inner.startswith(f"{path}.")))
        if any(_has_router(modules[path], num_experts, inside | other) for num_experts, inside in layers[path]):
            of_inner[path] = {id(parameter) for parameter in modules[path].parameters()}
    return [path for path in layers if path in of_inner]


_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
_CONVOLUTIONS = (
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)


def _experts_in(module: torch.nn.Module) -> Iterator[tuple[int, list[torch.nn.Parameter]]]:
    """Yield the number and the parameters of what may be experts: of each list in a module, of each stack [E,...]."""
    for part in module.children():
        if isinstance(part, _LISTS) and len(part) > 1:
            entries = (
                list(part.values()) if isinstance(part, (torch.nn.ModuleDict, torch.nn.ParameterDict)) else list(part)
            )
            owned = [
                [entry] if isinstance(entry, torch.nn.Parameter) else list(entry.parameters()) for entry in entries
            ]
            if owned[0] and len({tuple(parameter.shape for parameter in each) for each in owned}) == 1:
                yield len(entries), [parameter for each in owned for parameter in each]
    if not (type(module).__module__.startswith("torch.nn.") or isinstance(module, _CONVOLUTIONS)):
        for parameter in module.parameters(recurse=False):
            if parameter.ndim > 2 and parameter.shape[0] > 1:
                yield parameter.shape[0], [parameter]


def _has_router(module: torch.nn.Module, num_experts: int, experts: Set[int]) -> bool:
    matrices = (parameter for parameter in module.parameters() if parameter.ndim == 2 and id(parameter) not in experts)
    return any(num_experts in parameter.shape for parameter in matrices)


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
