"""The repeated layers of a model, found by their structure, and the model with fewer of them.

Two layers are equal where their modules, parameters and plain attributes are, but for the layer's own number. A stack
is a beginning, a unit of one or several layers that repeats (a full attention after three sliding ones), and a rest
that begins the unit once more. The beginning and the rest are kept as they are, so the unit's number in a model is
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
    """Where a model's layers repeat.

    Args:
        path: of the list of layers.
        begin: layers before the first unit.
        unit: layers in one.
        repeats: how often it stands there.
    """

    path: str
    begin: int
    unit: int
    repeats: int


def find_stack(model: torch.nn.Module) -> Stack | None:
    """The stack that leaves fewest layers to analyse, None where no unit stands there five times."""
    lists = ((path, one) for path, one in model.named_modules() if isinstance(one, torch.nn.ModuleList))
    found = [stack for path, layers in lists if (stack := _stack_of(path, list(layers))) is not None]
    return max(found, key=lambda one: one.unit * one.repeats, default=None)


def layer_lists(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model: of its lists of modules the one with most parameters."""
    lists = [list(one) for one in model.modules() if isinstance(one, torch.nn.ModuleList)]
    return max(lists, key=lambda one: sum(each.numel() for layer in one for each in layer.parameters()), default=[])


def shortened(model: torch.nn.Module, stack: Stack, repeats: int) -> None:
    """Leave so many repeats of the unit in the model."""
    parent, _, name = stack.path.rpartition(".")
    layers = list(model.get_submodule(stack.path).children())
    kept = stack.begin + stack.unit * repeats
    rest = layers[stack.begin + stack.unit * stack.repeats :]
    setattr(model.get_submodule(parent), name, torch.nn.ModuleList([*layers[:kept], *rest]))


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
