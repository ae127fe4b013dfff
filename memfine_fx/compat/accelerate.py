"""accelerate: the enumeration of backends that `TrainingArguments(torch_compile_backend=...)` looks names up in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from memfine_fx.compat.checks import Feature, expect

__all__ = ["BACKENDS", "add_backend", "hand_over_models"]

_HANDS_OVER = "_memfine_hands_over"
_NAME = "MEMFINE"


def add_backend(dataclasses: Any) -> None:
    """Make "memfine" one of accelerate's backends, in the module of its enumeration. Twice changes nothing."""
    backends = getattr(dataclasses, "DynamoBackend", None)
    if backends is None or _NAME in backends.__members__:
        return
    try:
        member = str.__new__(backends, _NAME)
        member._name_ = member._value_ = _NAME
        backends._member_names_.append(_NAME)
        backends._member_map_[_NAME] = backends._value2member_map_[_NAME] = member
        expect(backends(_NAME) is member and backends[_NAME] is member, "the name that was added is not found")
    except (AttributeError, TypeError, ValueError, KeyError, AssertionError) as error:
        # NOTE: given up and not checked beforehand, because accelerate may be in the middle of its import.
        BACKENDS.give_up(f"{type(error).__name__}: {error}")


def hand_over_models(accelerator: Any, optimize: Callable[[Any, Any], bool]) -> None:
    """Let a model that accelerate would compile by our name be optimized in place instead, before it is wrapped.

    By the name alone the backend sees what Dynamo has captured already; loops, adapters and recorders need more.

    Args:
        accelerator: the module of that class. Twice changes nothing.
        optimize: (model, TorchDynamoPlugin) -> whether the model is optimized; if not, accelerate compiles it.
    """
    prepare_model = getattr(getattr(accelerator, "Accelerator", None), "prepare_model", None)
    if prepare_model is None:
        BACKENDS.give_up("there is no Accelerator.prepare_model")
        return
    if hasattr(prepare_model, _HANDS_OVER):
        return

    @functools.wraps(prepare_model)
    def prepare_optimized(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.state, "dynamo_plugin", None)
        if plugin is None or plugin.backend.value != _NAME or not optimize(model, plugin):
            return prepare_model(self, model, *args, **kwargs)
        ours, plugin.backend = plugin.backend, type(plugin.backend)("NO")
        try:
            return prepare_model(self, model, *args, **kwargs)
        finally:
            plugin.backend = ours

    setattr(prepare_optimized, _HANDS_OVER, True)
    accelerator.Accelerator.prepare_model = prepare_optimized


def _check_hand_over() -> None:
    from types import SimpleNamespace

    class Backend(StrEnum):
        NO = "NO"
        MEMFINE = _NAME

    class Accelerator:
        state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=Backend.MEMFINE))

        def prepare_model(self, model: Any) -> Any:
            return model, self.state.dynamo_plugin.backend

    hand_over_models(SimpleNamespace(Accelerator=Accelerator), lambda model, plugin: True)
    expect(Accelerator().prepare_model("model") == ("model", Backend.NO), "a model is compiled a second time")
    expect(Accelerator.state.dynamo_plugin.backend is Backend.MEMFINE, "the next model is not handed over")


def _check_backends() -> None:
    from types import SimpleNamespace

    class Names(StrEnum):
        EAGER = "EAGER"

    add_backend(SimpleNamespace(DynamoBackend=Names))
    expect([str(member.value) for member in Names] == ["EAGER", _NAME], f"names are {list(Names)}")
    _check_hand_over()


BACKENDS = Feature(
    name="accelerate.utils.dataclasses.DynamoBackend, accelerate.Accelerator.prepare_model",
    package="accelerate",
    purpose='TrainingArguments(torch_compile_backend="memfine")',
    seen=("1.10", "1.15"),
    fallback='TrainingArguments(torch_compile_backend="memfine") is not known; memfine_fx.optimize(model) before the '
    "trainer is made works.",
    check=_check_backends,
)
