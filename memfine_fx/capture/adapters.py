"""PEFT's adapters on expert weights (`target_parameters`), written so that they reach a graph.

PEFT adds a low-rank update to an expert table by registering a parametrization around each call, which changes the
module's class and breaks the graph several times a layer. For the time of a compiled call the same sum W + B A is
made in the graph and handed to the experts with `torch.func.functional_call`. Merged, disabled and mixed adapters, and
weights that PEFT upcasts, run as PEFT wrote them.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from memfine_fx.capture.installing import InstalledMethods

__all__ = ["TracedAdapters"]

_MODULE = "peft.tuners.lora.layer"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TracedAdapters:
    """The wrapped expert tables of a model.

    Args:
        model: searched once; adapters added later are not seen.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        wrapper = getattr(sys.modules.get(_MODULE), "ParamWrapper", None)
        found = [] if wrapper is None else [one for one in model.modules() if type(one) is wrapper]
        self._methods = InstalledMethods([(one, "forward", _forward) for one in found if "forward" not in vars(one)])
        self._num_left = sum("forward" in vars(one) for one in found)

    @property
    def notes(self) -> list[str]:
        """What is not traced, for the report."""
        if not self._num_left:
            return []
        return [f"{self._num_left} adapters on expert weights have a forward of their own and run as it was set"]

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """The forwards in their modules' places, for compilations and calls inside.

        A wrapped table with a `forward` of its own keeps it: whoever set it may do more than call PEFT's.
        """
        return self._methods.installed()


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    adapters = [name for name in self.active_adapters if name in self.lora_A]
    weight = self.get_param()
    if self.disable_adapters or self.merged or not adapters or "adapter_names" in kwargs or weight.dtype not in _DTYPES:
        return type(self).forward(self, x, *args, **kwargs)
    for name in adapters:
        weight = weight + self.get_delta_weight(name)
    path, layer = self.parameter_name, self.base_layer
    while layer is not self.get_base_layer():
        path, layer = f"base_layer.{path}", layer.base_layer
    return torch.func.functional_call(self.base_layer, {path: weight}, (x, *args), kwargs)
