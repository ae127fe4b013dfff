"""LLaMA-Factory: the function that it checkpoints layers with, which looks at a layer's parameters in every call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from memfine_fx.compat.checks import Feature, expect

__all__ = ["CHECKPOINTING", "capture_checkpoints"]

_MAKER = "get_custom_gradient_checkpointing_func"
_CAPTURES = "_memfine_captures"


def capture_checkpoints(checkpointing: Any) -> None:
    """Let Dynamo see the checkpoint itself, in the module that wraps it. Twice changes nothing.

    The wrapper leaves out layers without trained parameters, and makes a layer's input want a gradient, which a
    reentrant checkpoint needs. Captured, a checkpoint needs neither: what wants no gradient is not recomputed.
    """
    make = getattr(checkpointing, _MAKER, None)
    if make is None:
        CHECKPOINTING.give_up(f"there is no {_MAKER}")
        return
    if hasattr(make, _CAPTURES):
        return

    @functools.wraps(make)
    def make_captured(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        made = make(checkpoint)

        @functools.wraps(made)
        def checkpoint_layer(function: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return checkpoint(function, *args, **kwargs)
            return made(function, *args, **kwargs)

        return checkpoint_layer

    setattr(make_captured, _CAPTURES, True)
    setattr(checkpointing, _MAKER, make_captured)


def _check_checkpointing() -> None:
    module = SimpleNamespace(**{_MAKER: lambda checkpoint: lambda function, *args: ("made", function(*args))})
    capture_checkpoints(module)
    expect(hasattr(getattr(module, _MAKER), _CAPTURES), "it cannot be replaced")
    wrapper = getattr(module, _MAKER)(lambda function, *args: function(*args))
    expect(wrapper(abs, -1) == ("made", 1), "a layer outside a capture is not checkpointed as it was")


CHECKPOINTING = Feature(
    name=f"llamafactory.model.model_utils.checkpointing.{_MAKER}",
    package="llamafactory",
    purpose="gradient checkpointing of LLaMA-Factory in captured graphs",
    seen=("0.9.5", "0.9.5"),
    fallback="LLaMA-Factory's gradient checkpointing breaks graphs in every layer, so that experts are not chunked; "
    "disable_gradient_checkpointing: true in its config file helps.",
    check=_check_checkpointing,
)
