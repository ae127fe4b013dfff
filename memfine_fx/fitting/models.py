"""Build a model of fake tensors from a config, in train mode: nothing is allocated, no weights are downloaded."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memfine_fx.compat.bitsandbytes import num_packed, scale_tensors, with_scales
from memfine_fx.compat.tensors import FakeTensorMode
from memfine_fx.errors import ConfigError, MissingPackage
from memfine_fx.fitting.adapters import adapted
from memfine_fx.fitting.setup import DTYPES, Setup
from memfine_fx.progress import stages

__all__ = ["expert_tensors", "fake_model", "held_tensors", "loaded_config", "num_parameters", "real_model"]

_POSITIVE = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
)
_MISSING = re.compile(r"'(\w+)' object has no attribute '(\w+)'")


def loaded_config(source: object) -> Any:
    """Return the transformers config of a folder, a config.json, a model type or a hub name; other things as they are.

    Code that comes with a checkpoint is not run, whatever its `auto_map` says.

    Raises:
        ConfigError: it is none of these, or its file is malformed.
        MissingPackage: transformers is not installed.
    """
    if not isinstance(source, (str, Path)):
        return source
    try:
        import transformers
    except ImportError as error:
        raise MissingPackage("transformers", "hf", "reading a model's config") from error
    path = Path(source)
    if path.is_dir() or path.suffix == ".json":
        return _config_of_file(path / "config.json" if path.is_dir() else path)
    known: Any = transformers.CONFIG_MAPPING
    if str(source) in known:
        return known[str(source)]()
    auto: Any = transformers.AutoConfig
    stages.info("asking the Hugging Face Hub for the config of %s, unless it is cached", source)
    try:
        return auto.from_pretrained(str(source), trust_remote_code=False)  # else it asks on the terminal
    except (OSError, ValueError, KeyError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"{str(source)!r} is no folder, no config.json, no model type of transformers {transformers.__version__}, "
            f"and no config of this name could be loaded: {reason}"
        ) from error


def _config_of_file(path: Path) -> Any:
    import transformers

    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no readable config: {error}") from error
    model_type = fields.pop("model_type", None) if isinstance(fields, dict) else None
    if model_type is None:
        raise ConfigError(f"{path} lacks the field 'model_type'")
    auto: Any = transformers.AutoConfig
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{path}: model_type={model_type!r} is none of transformers {transformers.__version__}; code that comes "
            "with a checkpoint (auto_map) is not run: give the model as path/to/file.py:factory"
        )
    try:
        return auto.for_model(model_type, **fields)
    except (ValueError, KeyError, TypeError, AttributeError, _invalid_field()) as error:
        raise ConfigError(f"{path}, model_type={model_type!r}: {_one_line(error)}") from error


def _invalid_field() -> type[Exception]:
    """Return the exception that a transformers config raises for a value of the wrong type; it names the field."""
    errors = importlib.import_module("huggingface_hub.errors")
    error_class: type[Exception] = getattr(errors, "StrictDataclassError", ValueError)
    return error_class


def _one_line(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def fake_model(source: object, setup: Setup, mode: FakeTensorMode) -> torch.nn.Module:
    """Return the model of a config, a factory or a module, made of this mode's fake tensors, in train mode.

    Args:
        source: a transformers config, a callable that makes a module, or a module, which is left as it is.

    Raises:
        ConfigError: it cannot be made; the message names the field where one is to blame.
    """
    meta = torch.device("meta")  # PEFT moves what it adds to its layer's device, which fake tensors do not allow
    model = source if isinstance(source, torch.nn.Module) else _build_model(source, setup, meta)
    model = _of_module(model, meta)
    if setup.checkpointing:
        _checkpoint(model)
    if setup.train != "full":
        model = adapted(model, setup)
    with mode:
        return _of_module(model, torch.device("cpu")).train()


def expert_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return those of `held_tensors` that belong to modules named as routed experts."""
    experts = (module for path, module in model.named_modules() if path.split(".")[-1] == "experts")
    return [tensor for module in experts for tensor in held_tensors(module)]


def held_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters, and the scales of weights in 4 bits."""
    return [*model.parameters(), *(scale for part in model.modules() for scale in scale_tensors(part))]


def num_parameters(model: torch.nn.Module) -> int:
    """Return how many numbers a model's parameters hold, those in 4 bits too."""
    packed = sum(num_packed(part) for part in model.modules())
    return packed + sum(parameter.numel() for parameter in model.parameters() if parameter.dtype is not torch.uint8)


def real_model(source: object, setup: Setup) -> torch.nn.Module:
    """Return the same model with allocated memory and random weights, to check `fake_model` against."""
    model = _build_model(source, setup, torch.device("cpu"))
    if setup.checkpointing:
        _checkpoint(model)
    if setup.train != "full":
        model = adapted(model, setup)
    return model.train()


def _build_model(source: Any, setup: Setup, device: torch.device) -> torch.nn.Module:
    try:
        with device:
            if callable(source) and not hasattr(source, "model_type"):
                model = source()
            else:
                _check_sizes(source)
                model = _of_config(source, DTYPES[setup.dtype])
    except AttributeError as error:
        missing = _MISSING.search(str(error))
        if missing is None:
            raise
        raise ConfigError(f"{missing[1]} lacks the field {missing[2]!r}, which the model reads") from error
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise ConfigError(f"the model cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"the factory returned {type(model).__name__}; expected a module")
    return model


def _of_config(config: Any, dtype: torch.dtype) -> Any:
    import transformers

    config = copy.deepcopy(config)
    auto: Any = transformers.AutoModelForCausalLM
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        config = config.get_text_config()
    if type(config) not in mapping:
        raise ConfigError(
            f"model_type={config.model_type!r} has no causal language model in transformers "
            f"{transformers.__version__}; give the model as path/to/file.py:factory"
        )
    config.use_cache = False
    return auto.from_config(config, dtype=dtype, trust_remote_code=False)


def _of_module(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return a copy with uninitialized tensors on another device; the module may be on any device, meta too."""
    memo: dict[int, Any] = {}
    scales = [scale for part in module.modules() for scale in scale_tensors(part)]
    for tensor in (*module.buffers(), *scales):
        memo[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    for parameter in module.parameters():
        new_parameter = torch.nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter.requires_grad
        )
        with_scales(new_parameter, parameter, memo)
        memo[id(parameter)] = new_parameter
    copied: torch.nn.Module = copy.deepcopy(module, memo)
    return copied


def _check_sizes(config: Any) -> None:
    """Raise a ConfigError for sizes that no model can have, which would fail later under other names."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(text, "model_type"):
        raise ConfigError(f"{type(config).__name__} is no config of transformers and makes no module")
    for name in _POSITIVE:
        value = getattr(text, name, None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
            raise ConfigError(f"{name}={value!r} must be a positive int")
    heads, kv_heads = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    top_k = getattr(text, "num_experts_per_tok", None)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(text, name, None)
        if isinstance(experts, int) and isinstance(top_k, int) and experts and top_k > experts:
            raise ConfigError(f"num_experts_per_tok={top_k} exceeds {name}={experts}")
        groups = getattr(text, "n_group", None)
        if isinstance(experts, int) and isinstance(groups, int) and groups > 0 and experts % groups:
            raise ConfigError(f"{name}={experts} is no multiple of n_group={groups}")
    hidden, is_split = getattr(text, "hidden_size", None), getattr(text, "head_dim", None) is None
    if heads and hidden and is_split and not hasattr(text, "kv_lora_rank") and hidden % heads:
        raise ConfigError(
            f"hidden_size={hidden} is no multiple of num_attention_heads={heads}, and there is no head_dim"
        )


def _checkpoint(model: Any) -> None:
    enable: Callable[..., object] | None = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ConfigError(f"checkpointing=True: {type(model).__name__} offers no gradient_checkpointing_enable")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
