"""Quantized weights, captured so that no tensor of all of them in full precision is saved.

bitsandbytes caches what it makes of a table in 4 bits until the module's forward ends, for modules that read it more
than once. In a graph that would be an output: the whole table, alive from its layer to the end of forward. For the time
of a compiled call its two hooks do nothing.

Its linear layers multiply by packed weights in a function that asks how many rows there are, which Dynamo cannot know
of an expert's. For the time of a compiled call they multiply by an operator that does the same on a CPU, keeps the
packed weight alone for backward, and has a rule in the reader.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from memfine_fx.capture.forward_wrappers import is_own
from memfine_fx.capture.installing import InstalledForCalls, InstalledMethods
from memfine_fx.compat.bitsandbytes import caching_hooks, compute_dtype, layers_in_4_bits, packed_product

__all__ = ["UncachedTables", "hint_for_packed_layers", "traced_layers"]

_DECOMPRESSING = ("ct_decompress_hook", "quantization_scheme")
"""What compressed-tensors sets on a model that makes its weights whole at its first call, and on its layers."""


class UncachedTables(InstalledForCalls):
    """The caching hooks of a model, without which calls run.

    Args:
        model: searched once; `structure.FoundAgain` searches again when tables were made quantized.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._hooks = caching_hooks(model)
        self._taken: list[tuple[MutableMapping[int, Any], int, Any]] = []

    def _put_in(self) -> None:
        for hooks, key in self._hooks:
            if key in hooks:
                self._taken.append((hooks, key, hooks[key]))
                hooks[key] = _nothing

    def _take_out(self) -> None:
        for hooks, key, hook in self._taken:
            if hooks.get(key) is _nothing:
                hooks[key] = hook
        self._taken.clear()


def traced_layers(model: torch.nn.Module) -> InstalledMethods:
    """Forwards for a model's linear layers in 4 bits; one with a forward of its own keeps it."""
    layers = [layer for layer in layers_in_4_bits(model) if not is_own(layer, "forward")]
    return InstalledMethods([(layer, "forward", _forward) for layer in layers])


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    dtype = compute_dtype(self, x)
    product = packed_product(self, x.to(dtype)) if torch.compiler.is_compiling() else None
    if product is None:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return (product if self.bias is None else product + self.bias.to(dtype)).to(x.dtype)


def hint_for_packed_layers(model: torch.nn.Module) -> str:
    """Return a hint about layers whose packed weights keep experts out of the graphs; "" if there are none."""
    classes = {f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()}
    if any(hasattr(module, name) for module in model.modules() for name in _DECOMPRESSING):
        return (
            "; compressed-tensors makes weights whole in the model's first call, and wraps every forward, which breaks "
            "the graph: load the model with CompressedTensorsConfig(dequantize=True)"
        )
    if "bitsandbytes.nn.modules.Linear8bitLt" in classes:
        return (
            "; bitsandbytes' 8-bit linear layers run outside of graphs where experts are made of them: its 4-bit ones "
            "(load_in_4bit) are captured"
        )
    if any(name.startswith(("gptqmodel.", "awq.")) for name in classes):
        return (
            "; linear layers of GPTQ and AWQ run outside of graphs where experts are made of them: experts whose "
            "weights were made whole before are captured"
        )
    return ""


def _nothing(*args: object, **kwargs: object) -> None:
    """A hook in the place of another."""
