"""accelerate: the enumeration of backends that `TrainingArguments(torch_compile_backend=...)` looks names up in."""

from __future__ import annotations

from typing import Any

from memfine_fx.compat.checks import Hook, expect

__all__ = ["BACKENDS", "MODULE", "add_backend"]

MODULE = "accelerate.utils.dataclasses"
_NAME = "MEMFINE"


def add_backend(dataclasses: Any) -> None:
    """Make "memfine" one of accelerate's backends; `dataclasses` is its module `MODULE`. Twice changes nothing."""
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


def _check_backends() -> None:
    from enum import StrEnum
    from types import SimpleNamespace

    class Names(StrEnum):
        EAGER = "EAGER"

    add_backend(SimpleNamespace(DynamoBackend=Names))
    expect([str(one.value) for one in Names] == ["EAGER", _NAME], f"names are {list(Names)}")


BACKENDS = Hook(
    name="accelerate.utils.dataclasses.DynamoBackend",
    host="accelerate",
    purpose='TrainingArguments(torch_compile_backend="memfine")',
    seen=("1.10", "1.15"),
    loss='TrainingArguments(torch_compile_backend="memfine") is not known; memfine_fx.optimize(model) before the '
    "trainer is made works.",
    check=_check_backends,
)
