"""bitsandbytes: parameters in 4 bits, which a parametrization makes whole when they are read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import MutableMapping
from typing import Any

import torch

from memfine_fx.compat.checks import Hook, expect

__all__ = ["DEQUANTIZE_4BIT", "TABLE_CACHE", "caching_hooks"]

_MODULE = "bitsandbytes.nn.parametrize"
_HOOKS = ("_enable_parametrization_cache", "_disable_parametrization_cache")

DEQUANTIZE_4BIT = "bitsandbytes::dequantize_4bit"
"""(packed, absmax, blocksize, quant_type, shape, dtype) -> [*shape]; two numbers a byte, one absmax for each
`blocksize` numbers in their order in memory."""


def caching_hooks(model: torch.nn.Module) -> list[tuple[MutableMapping[int, Any], int]]:
    """Where the hooks stand that keep made tables until a module's forward ends: (the module's hooks, their key)."""
    functions = {getattr(sys.modules.get(_MODULE), name, None) for name in _HOOKS} - {None}
    if not functions:
        return []
    found: list[tuple[MutableMapping[int, Any], int]] = [
        (hooks, key)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for key, hook in hooks.items()
        if hook in functions
    ]
    return found if found and TABLE_CACHE.holds() else []


def _check_cache() -> None:
    """A parameter in 4 bits is the same tensor with its module's hooks and without them."""
    parametrize: Any = importlib.import_module(_MODULE)
    module = torch.nn.Module()
    with torch.random.fork_rng(devices=[]):
        module.weight = torch.nn.Parameter(torch.randn(2, 64))
    parametrize.replace_parameter_4bit(module, "weight")
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    expect(len(hooks) == 2 and all(getattr(parametrize, name) in hooks for name in _HOOKS), f"its hooks are {hooks}")
    expect(torch.equal(module.weight, module.weight), "two reads differ")
    name = torch.ops.bitsandbytes.dequantize_4bit.default._schema.name
    expect(name == DEQUANTIZE_4BIT, f"its operator is called {name}")


TABLE_CACHE = Hook(
    name="bitsandbytes.nn.parametrize._enable_parametrization_cache",
    host="bitsandbytes",
    purpose="tables in 4 bits that are made one expert at a time",
    seen=("0.50", "0.50"),
    loss="Experts whose tables bitsandbytes keeps in 4 bits are chunked, but each table is made whole.",
    check=_check_cache,
)
