"""nn.Module: the place of a compiled call, parameters as the module itself holds them, and those that DDP ignores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from memfine_fx.compat.autograd import ACCUMULATED
from memfine_fx.compat.checks import Feature, expect

__all__ = [
    "COMPILED_CALLS",
    "IGNORED_BY_DDP",
    "compiled_call_of",
    "forward_hooks",
    "has_compiled_call",
    "hooks_after_gradient",
    "hooks_of",
    "ignore_in_ddp",
    "own_buffers",
    "own_parameters",
    "plain_call",
    "set_compiled_call",
    "written_module",
]


def plain_call(model: torch.nn.Module) -> Callable[..., Any]:
    """A module's call with its hooks, as written, whatever was compiled of it."""
    call: Callable[..., Any] = model._call_impl
    return call


def set_compiled_call(model: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a module run this in place of its plain call; it is left out of copies and of what is pickled."""
    model._compiled_call_impl = call


def written_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module as written, of what `torch.compile` returned or of any other."""
    written: torch.nn.Module = getattr(module, "_orig_mod", module)
    return written


def compiled_call_of(model: torch.nn.Module) -> Callable[..., Any] | None:
    """Return what a module that was compiled in place runs in place of its plain call."""
    call: Callable[..., Any] | None = model._compiled_call_impl
    return call


def has_compiled_call(model: torch.nn.Module) -> bool:
    """Whether a module was compiled, in place or as what `torch.compile` returns."""
    return model._compiled_call_impl is not None or hasattr(model, "_orig_mod")


def own_parameters(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    """Name -> parameter of a module itself, past any property of its class."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, Any]:
    """Name -> buffer of a module itself; changing it changes the module."""
    return module._buffers


def forward_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """Return the dictionary in which `register_forward_hook` puts a module's hooks, by the id of their handle.

    Changing it changes the hooks.
    """
    return module._forward_hooks


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return the hooks that run before and after a module's forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def hooks_after_gradient(parameter: torch.Tensor) -> dict[int, Any]:
    """Return the dictionary in which `register_post_accumulate_grad_hook` puts a parameter's hooks.

    Changing it changes the hooks. It is a new, empty dictionary where there are none or `autograd.ACCUMULATED` does
    not hold.
    """
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks if ACCUMULATED.holds() else None
    return {} if hooks is None else hooks


def _check_compiled_calls() -> None:
    probe = torch.nn.Identity()
    set_compiled_call(probe, lambda value: plain_call(probe)(value) + 1)
    expect(probe(1) == 2, "a module does not run what was compiled of it")
    set_compiled_call(probe, None)
    expect(probe(1) == 1, "a module does not run as written again")


COMPILED_CALLS = Feature(
    name="torch.nn.Module._compiled_call_impl",
    package="torch",
    purpose="a model that is optimized in place: same type, same methods, same state_dict",
    seen=("2.11", "2.15"),
    fallback='memfine_fx.optimize changes nothing: models run as written. torch.compile(model, backend="memfine") '
    "works.",
    check=_check_compiled_calls,
)


_IGNORED = "_ddp_params_and_buffers_to_ignore"


def ignore_in_ddp(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Let a DistributedDataParallel of this model leave parameters alone, beside those that it leaves alone already."""
    object.__setattr__(model, _IGNORED, [*getattr(model, _IGNORED, ()), *names])


def _check_ignored() -> None:
    wrapper = torch.nn.parallel.DistributedDataParallel
    probe = torch.nn.Identity()
    wrapper._set_params_and_buffers_to_ignore_for_model(probe, ["probe"])  # type: ignore[no-untyped-call]
    expect(getattr(probe, _IGNORED, None) == ["probe"], "ignored names are stored elsewhere")
    expect(f"module.{_IGNORED}" in inspect.getsource(wrapper.__init__), "what is ignored is not read")


IGNORED_BY_DDP = Feature(
    name="DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    package="torch",
    purpose="experts of which each rank has its own, under DistributedDataParallel",
    seen=("2.11", "2.15"),
    fallback="DistributedDataParallel would average different experts, so expert_parallel is refused.",
    check=_check_ignored,
)
