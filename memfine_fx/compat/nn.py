"""nn.Module: the place of a compiled call, and parameters as the module itself holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfine_fx.compat.checks import Hook, expect

__all__ = ["COMPILED_CALLS", "compiled_call", "own_parameters", "plain_call", "set_compiled_call"]


def plain_call(model: torch.nn.Module) -> Callable[..., Any]:
    """A module's call with its hooks, as written, whatever was compiled of it."""
    call: Callable[..., Any] = model._call_impl
    return call


def compiled_call(model: torch.nn.Module) -> Callable[..., Any]:
    """What a module runs in place of its plain call."""
    compiled = model._compiled_call_impl
    assert compiled is not None
    return compiled


def set_compiled_call(model: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a module run this in place of its plain call; it is left out of copies and of what is pickled."""
    model._compiled_call_impl = call


def own_parameters(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    """Name -> parameter of a module itself, past any property of its class."""
    return module._parameters


def _check_compiled_calls() -> None:
    probe = torch.nn.Identity()
    set_compiled_call(probe, lambda value: plain_call(probe)(value) + 1)
    expect(probe(1) == 2, "a module does not run what was compiled of it")
    set_compiled_call(probe, None)
    expect(probe(1) == 1, "a module does not run as written again")


COMPILED_CALLS = Hook(
    name="torch.nn.Module._compiled_call_impl",
    host="torch",
    purpose="a model that is optimized in place: same type, same methods, same state_dict",
    seen=("2.11", "2.15"),
    loss='memfine_fx.optimize changes nothing: models run as written. torch.compile(model, backend="memfine") works.',
    check=_check_compiled_calls,
)
