"""Add PEFT's LoRA adapters to a model's layers, and quantize their weights to 4 bits as QLoRA does.

In 4 bits (NF4 in blocks of 64, scales quantized too) are all plain linear layers but the head, as transformers loads a
model with `load_in_4bit`, and expert weights, which that leaves whole and bitsandbytes' `replace_parameter_4bit`
packs. All others keep their dtype, and adapters have that of the model (PEFT with `autocast_adapter_dtype=False`).
Names of expert weights among the targets become PEFT's `target_parameters`.
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
        ConfigError: a target names nothing, or what no adapter can be added to.
        MissingPackage: PEFT or bitsandbytes is not installed.
    """
    peft = _package("peft", "LoRA adapters")
    weights = [name for name in setup.targets if _names_expert_weight(model, name)]
    layers = [name for name in setup.targets if name not in weights]
    if weights and setup.train == "qlora":
        raise ConfigError(f"targets={weights}: PEFT adds adapters to expert weights only where these are not in 4 bits")
    unknown = [name for name in layers if not any(_is_end_of(name, path) for path, _ in model.named_modules())]
    if unknown and layers != ["all-linear"]:  # PEFT fails only where it finds none of them
        raise ConfigError(f"targets={list(setup.targets)}: {unknown} name nothing here; {_targets_in_words(model)}")
    if setup.train == "qlora":
        _pack(model)
    others = {name: type(module).__name__ for name, module in model.named_modules() if _gives_something_else(module)}
    for name, kind in others.items():
        if name.rpartition(".")[2] in setup.targets:
            raise ConfigError(
                f"targets={list(setup.targets)}: {name} is a {kind}, which does not return what a linear layer does; "
                "PEFT cannot add to it"
            )
    try:
        config = peft.LoraConfig(
            r=setup.lora_r,
            target_modules=layers or ([] if weights else "all-linear"),
            target_parameters=weights or None,
            exclude_modules=sorted(others) or None,
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of its own patterns for expert tables that it did not use
            adapted_model: torch.nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(f"targets={list(setup.targets)}: {error}") from error
    return adapted_model


def _targets_in_words(model: torch.nn.Module) -> str:
    """Return the names that targets can have: of linear layers, and of expert weights with their module's."""
    layers = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    weights = {f"{'.'.join(path.split('.')[-2:])}.{name}" for path, name in _paths_of_tables(model)}
    return f"linear layers: {', '.join(sorted(layers))}; expert weights: {', '.join(sorted(weights)) or 'none'}"


def _names_expert_weight(model: torch.nn.Module, name: str) -> bool:
    """Return whether a target is the end of a name of expert weights, and not of a layer's."""
    if any(_is_end_of(name, path) for path, _ in model.named_modules()):
        return False
    return any(_is_end_of(name, f"{path}.{parameter}") for path, parameter in _paths_of_tables(model))


def _is_end_of(name: str, path: str) -> bool:
    """Return whether a path of modules ends in a name, as PEFT matches its targets."""
    return path == name or path.endswith(f".{name}")


def _paths_of_tables(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (path of the module, name) of parameters that hold a matrix for each expert."""
    for path, module in model.named_modules():
        if "experts" in path.split("."):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3:
                    yield path, name


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
    for path, name in list(_paths_of_tables(model)):
        pack_table(model.get_submodule(path), name)
    model.is_loaded_in_4bit = True  # as after loading: PEFT asks
