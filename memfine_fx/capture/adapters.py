"""PEFT's adapters on expert weights (`target_parameters`), written so that they reach a graph.

PEFT adds a low-rank update to an expert table by registering a parametrization around each call, which changes the
module's class and breaks the graph several times a layer. For the time of a compiled call the same sum W + B A is
made in the graph and handed to the experts with `torch.func.functional_call`. A table that a parametrization makes
itself (numbers in 4 bits) cannot be handed over; there the sum is what that parametrization gives. Merged, disabled and
mixed adapters, and weights that PEFT upcasts, run as PEFT wrote them; so does what runs outside of a graph, because a
checkpoint there is recomputed after the call, when PEFT's forwards are in their places.

DoRA, which PEFT has for linear layers alone, asks a weight's class for its module, which Dynamo does not trace, and
makes B A of an identity matrix. For the time of a compiled call its layers read plain weights, and multiply B by A.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from memfine_fx.capture.forward_wrappers import is_own
from memfine_fx.capture.installing import InstalledMethods
from memfine_fx.compat.peft import (
    active_adapters,
    layers_with_magnitudes,
    low_rank_product,
    parametrized_table,
    updated_weight,
    with_adapters,
    with_whole_weight,
    wrapped_tables,
)

__all__ = ["TracedAdapters", "hint_for_adapters"]


class TracedAdapters:
    """The wrapped expert tables of a model.

    Args:
        model: searched once; `structure.FoundAgain` searches again when adapters were added.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        wrappers = wrapped_tables(model)
        methods: list[tuple[torch.nn.Module, str, Callable[..., object]]] = []
        for module in wrappers:
            if not is_own(module, "forward"):
                methods += _methods_of(module)
        for module in layers_with_magnitudes(model):
            if not is_own(module, "forward"):
                methods += [(module, "forward", _forward_with_magnitude), (module, "get_lora_weight", _lora_weight)]
        self._methods = InstalledMethods(methods)
        self._num_left = sum(is_own(wrapper, "forward") for wrapper in wrappers)

    @property
    def notes(self) -> list[str]:
        """Return notes for the report about adapters that are not traced."""
        if not self._num_left:
            return []
        return [f"{self._num_left} adapters on expert weights have a forward of their own and run as it was set"]

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """The forwards in their modules' places, for compilations and calls inside.

        A wrapped table with a `forward` of its own keeps it: whoever set it may do more than call PEFT's.
        """
        return self._methods.installed()


def hint_for_adapters(model: torch.nn.Module | None) -> str:
    """Return a hint about adapters that keep experts out of the graphs; "" if no adapter does.

    Args:
        model: the running model, compiled by the backend's name; None for a model that `optimize` prepared.
    """
    if model is None or not wrapped_tables(model):
        return ""
    return (
        "; PEFT adds its adapters to expert tables (target_parameters) around each call, which breaks the graph: call "
        "memfine_fx.optimize(model) instead of the backend's name"
    )


def _methods_of(wrapper: Any) -> list[tuple[torch.nn.Module, str, Callable[..., object]]]:
    table = parametrized_table(wrapper)
    if table is None:
        return [(wrapper, "forward", _forward)]
    return [(wrapper, "forward", _forward_over_table), (table, "forward", _table_with_adapters_of(wrapper))]


def _forward_over_table(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The experts as they are: their table comes with adapters."""
    if "adapter_names" in kwargs or not torch.compiler.is_compiling():
        return type(self).forward(self, x, *args, **kwargs)
    return self.base_layer(x, *args, **kwargs)


def _table_with_adapters_of(wrapper: Any) -> Callable[..., torch.Tensor]:
    adding: list[torch.Tensor] = []  # PEFT asks the table for its dtype while it makes an adapter's product

    def forward(self: Any) -> torch.Tensor:
        if adding:
            return adding[0]
        weight: torch.Tensor = type(self).forward(self)
        if not torch.compiler.is_compiling():
            return weight
        adding.append(weight)
        try:
            return with_adapters(wrapper, weight)
        finally:
            adding.clear()

    return forward


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() or not active_adapters(self) or "adapter_names" in kwargs:
        return type(self).forward(self, x, *args, **kwargs)
    path, weight = updated_weight(self)
    return torch.func.functional_call(self.base_layer, {path: weight}, (x, *args), kwargs)


def _forward_with_magnitude(self: Any, x: torch.Tensor, *, base_layer: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        base_layer = with_whole_weight(base_layer)
    return type(self).forward(self, x, base_layer=base_layer, **kwargs)


def _lora_weight(self: Any, lora_A: Any, lora_B: Any, **kwargs: Any) -> torch.Tensor:
    product = low_rank_product(lora_A, lora_B) if torch.compiler.is_compiling() else None
    return type(self).get_lora_weight(self, lora_A, lora_B, **kwargs) if product is None else product
