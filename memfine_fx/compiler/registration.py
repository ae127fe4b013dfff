"""Make backend="memfine" known to Dynamo and to accelerate, without importing either.

An installed package is found by Dynamo through its entry point. A bare checkout has none, and accelerate (thus
`TrainingArguments(torch_compile_backend="memfine")`) takes only names in an enumeration of its own. So both modules are
watched: one that is loaded already is changed now, another right after it loads.

`import memfine_fx` does that. Programs that read a config file, such as `trl sft` or `llamafactory-cli train`, import
nothing of ours: where MEMFINE_OPTIONS is set, `import torch` imports memfine_fx (`memfine_fx_autoload`).

A model that accelerate compiles by the name is optimized in place instead, because the backend alone comes too late for
what has to be prepared before Dynamo captures anything.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from memfine_fx.compat.loading import (
    ACCELERATE_BACKENDS,
    ACCELERATOR,
    DYNAMO_BACKENDS,
    EXPERTS_FUNCTIONS,
    FP8_EXPERTS_FUNCTIONS,
    LLAMAFACTORY_CHECKPOINTS,
    LORA_LAYERS,
    MODELS,
    tell_when_loaded,
)

__all__ = ["register_backend"]


def register_backend() -> None:
    """Make `backend="memfine"` known and its hosts' layers readable, now or when they load. Twice changes nothing."""
    tell_when_loaded(DYNAMO_BACKENDS, _tell_dynamo)
    tell_when_loaded(ACCELERATE_BACKENDS, _tell_accelerate)
    tell_when_loaded(ACCELERATOR, _tell_accelerator)
    tell_when_loaded(LLAMAFACTORY_CHECKPOINTS, _tell_llamafactory)
    tell_when_loaded(EXPERTS_FUNCTIONS, _tell_transformers)
    tell_when_loaded(FP8_EXPERTS_FUNCTIONS, _tell_transformers)
    tell_when_loaded(MODELS, _tell_models)
    tell_when_loaded(LORA_LAYERS, _tell_peft)


def _tell_dynamo(registry: Any) -> None:
    if entry_points(group="torch_dynamo_backends", name="memfine"):
        return  # found when the name is asked for: whoever compiles otherwise loads nothing of ours
    from memfine_fx.compat import dynamo
    from memfine_fx.compiler.entry import memfine

    dynamo.register_backend(registry, memfine, "memfine")


def _tell_accelerate(dataclasses: Any) -> None:
    from memfine_fx.compat import accelerate

    accelerate.add_backend(dataclasses)


def _tell_accelerator(accelerator: Any) -> None:
    from memfine_fx.compat import accelerate

    accelerate.hand_over_models(accelerator, _optimized)


def _tell_llamafactory(checkpointing: Any) -> None:
    from memfine_fx.compat import llamafactory

    llamafactory.capture_checkpoints(checkpointing)


def _tell_transformers(module: Any) -> None:
    from memfine_fx.compat import transformers

    transformers.register_experts_function(module, "memfine", _experts_forward)


def _tell_models(modeling_utils: Any) -> None:
    from memfine_fx.compat import transformers

    transformers.accept_experts_function(modeling_utils, "memfine")


def _tell_peft(layers: Any) -> None:
    from memfine_fx.compat import peft, transformers

    peft.activate_unchecked(layers, lambda experts: transformers.name_of_experts_function(experts) == "memfine")


def _experts_forward(experts: Any, hidden: Any, index: Any, weight: Any) -> Any:
    """See `experts_function`, which is loaded when a layer is first called."""
    import torch

    from memfine_fx.compiler import experts_function

    if torch.compiler.is_compiling():
        return experts_function.experts_in_graph(experts, hidden, index, weight)
    return experts_function.experts_forward(experts, hidden, index, weight)


def _optimized(model: Any, plugin: Any) -> bool:
    """Whether a model is optimized after this, as the plugin's options say; not where a mode asks for the backend.

    Raises:
        ConfigError: an option is malformed.
    """
    from memfine_fx.compat import accelerate
    from memfine_fx.compat.nn import COMPILED_CALLS, has_compiled_call
    from memfine_fx.compiler.optimized import Options, optimize_in_place, optimized_call
    from memfine_fx.config import Config

    if optimized_call(model) is not None:
        return True
    if plugin.disable or has_compiled_call(model) or plugin.mode not in (None, "default"):
        return False
    if not (COMPILED_CALLS.holds() and accelerate.BACKENDS.holds()):
        return False
    optimize_in_place(model, Options(Config.from_options(plugin.options), bool(plugin.fullgraph), plugin.dynamic))
    return True
