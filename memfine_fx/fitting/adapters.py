"""Add PEFT's LoRA adapters to a model's layers, and quantize their weights to 4 bits as QLoRA does.

In 4 bits (NF4 in blocks of 64, scales quantized too) are all plain linear layers but the head, as transformers loads a
model with `load_in_4bit`, and expert weights, which that leaves whole and bitsandbytes' `replace_parameter_4bit`
packs. All others keep their dtype, and adapters have that of the model (PEFT with `autocast_adapter_dtype=False`).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from memfine_fx.compat.bitsandbytes import pack_layers, pack_table
from memfine_fx.errors import ConfigError, MissingPackage
from memfine_fx.fitting.setup import Setup

__all__ = ["adapted"]


def adapted(model: Any, setup: Setup) -> torch.nn.Module:
    """Return the model with adapters beside frozen weights, in 4 bits where the setup says so; weights may be meta.

    Raises:
        ConfigError: the targets are no layers, or such that no adapter can be added to.
        MissingPackage: PEFT or bitsandbytes is not installed.
    """
    peft = _package("peft", "LoRA adapters")
    if setup.train == "qlora":
        _pack(model)
    others = {name: type(module).__name__ for name, module in model.named_modules() if _gives_something_else(module)}
    for name, kind in others.items():
        if name.rpartition(".")[2] in setup.targets:
            raise ConfigError(
                f"targets={list(setup.targets)}: {name} is a {kind}, which does not return what a linear layer does; "
                "PEFT cannot add to it"
            )
    targets = list(setup.targets) or "all-linear"
    try:
        config = peft.LoraConfig(
            r=setup.lora_r, target_modules=targets, exclude_modules=sorted(others) or None, task_type="CAUSAL_LM"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of its own patterns for expert tables that it did not use
            adapted_model: torch.nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(f"targets={list(setup.targets)}: {error}") from error
    return adapted_model


def _package(name: str, purpose: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(name, "trainers", purpose) from error


def _gives_something_else(module: torch.nn.Module) -> bool:
    """Return whether a module is a linear layer by its class and returns something else, as routers return a tuple.

    PEFT takes such a module for a linear layer, and its step fails.
    """
    is_plain = type(module).forward is torch.nn.Linear.forward or type(module).__module__.startswith("bitsandbytes.")
    return isinstance(module, torch.nn.Linear) and not is_plain


def _pack(model: Any) -> None:
    _package("bitsandbytes", "weights in 4 bits")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    pack_layers(model, {name for name, layer in model.named_modules() if layer is head})
    for module, name in list(_tables(model)):
        pack_table(module, name)
    model.is_loaded_in_4bit = True  # as after loading: PEFT asks


def _tables(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield (module, name) of parameters that hold a matrix for each expert."""
    for path, module in model.named_modules():
        if "experts" in path.split("."):
            yield from (
                (module, name) for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3
            )
