"""Find the repeated layers of a model by their structure, and shorten the model to fewer of them.

Two layers are equal where their modules, parameters and plain attributes are, but for the layer's own number. A stack
is a beginning, a unit of one or several layers that repeats (a full attention after three sliding ones), and a rest
that begins the unit once more. The beginning and the rest stay as they are, so the unit's number in a model is
the only thing that changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

__all__ = ["Stack", "find_stack", "layer_lists", "shortened"]

_LONGEST_UNIT = 8
_FEWEST_REPEATS = 5
"""Up to three and four repeats are analysed, so a model of fewer than five is analysed whole."""
_NUMBER = re.compile(r"^(layer_?)?(idx|id|index|number|num)$")


@dataclass(frozen=True)
class Stack:
    """The repeated layers in a model's list of layers.

    Args:
        path: of the list of layers.
        begin: layers before the first unit.
        unit: layers in one unit.
        repeats: how often the unit occurs.
    """

    path: str
    begin: int
    unit: int
    repeats: int


def find_stack(model: torch.nn.Module) -> Stack | None:
    """Return the stack that leaves fewest layers to analyse, None where no unit occurs five times."""
    lists = ((path, module) for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList))
    stacks = [stack for path, layers in lists if (stack := _stack_of(path, list(layers))) is not None]
    return max(stacks, key=lambda candidate: candidate.unit * candidate.repeats, default=None)


def layer_lists(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a model: of its lists of modules the one with most parameters."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(
        lists,
        key=lambda layers: sum(parameter.numel() for layer in layers for parameter in layer.parameters()),
        default=[],
    )


def shortened(model: torch.nn.Module, stack: Stack, repeats: int) -> None:
    """Shorten the model in place to `repeats` repeats of the unit."""
    parent, _, name = stack.path.rpartition(".")
    layers = list(model.get_submodule(stack.path).children())
    end = stack.begin + stack.unit * repeats
    rest = layers[stack.begin + stack.unit * stack.repeats :]
    setattr(model.get_submodule(parent), name, torch.nn.ModuleList([*layers[:end], *rest]))


def _stack_of(path: str, layers: Sequence[torch.nn.Module]) -> Stack | None:
    signatures = [tuple(_signature(layer)) for layer in layers]
    best: Stack | None = None
    for begin in range(len(layers)):
        for unit in range(1, _LONGEST_UNIT + 1):
            repeats = (len(layers) - begin) // unit
            if repeats < _FEWEST_REPEATS:
                break
            repeated = signatures[begin:]
            if repeated[unit:] == repeated[:-unit] and (best is None or begin + unit < best.begin + best.unit):
                best = Stack(path, begin, unit, repeats)
    return best


def _signature(layer: torch.nn.Module) -> Iterator[object]:
    for name, module in layer.named_modules():
        # Parametrized modules (bitsandbytes packs tables so) have a class each.
        yield name, type_before_parametrizations(module)
        yield from sorted(
            (attribute, value)
            for attribute, value in vars(module).items()
            if isinstance(value, (int, float, str)) and not attribute.startswith("_") and not _NUMBER.match(attribute)
        )
    for name, parameter in layer.named_parameters():
        yield name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad
