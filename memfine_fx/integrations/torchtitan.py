"""Make torchtitan compile the blocks of a model with memfine_fx.

torchtitan compiles block by block, with a backend that its config names; for models with FlexAttention it takes no name
but Inductor's. So the blocks are compiled here, once torchtitan has parallelized the model:

    config.model_spec = compiled_by_memfine(config.model_spec, memory_budget="60GiB")

The block's compiled call runs its hooks, FSDP2's too, so it may be installed after sharding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from memfine_fx.config import Config

__all__ = ["compiled_by_memfine"]


def compiled_by_memfine(model_spec: Any, **options: Any) -> Any:
    """Return a copy of a torchtitan `ModelSpec` that compiles each transformer block with memfine_fx.

    Args:
        model_spec: of `Trainer.Config`; its `parallelize_fn` is wrapped, everything else stays.
        options: fields of `Config`. A budget bounds a training step, all blocks together.

    Raises:
        ConfigError: an option does not exist, or has a bad value.
    """
    Config.from_options(options)
    parallelize_blocks = model_spec.parallelize_fn

    def parallelize(model: torch.nn.Module, *, compile_config: Any, **given: Any) -> torch.nn.Module:
        components = [name for name in compile_config.components if name != "model"]
        without = dataclasses.replace(compile_config, components=components)
        parallelized: torch.nn.Module = parallelize_blocks(model, compile_config=without, **given)
        for block in _blocks(parallelized):
            block.compile(backend="memfine", options=dict(options))
        return parallelized

    return dataclasses.replace(model_spec, parallelize_fn=parallelize)


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the transformer blocks of a torchtitan decoder, or of a pipeline stage of one."""
    layers = getattr(model, "layers", None)
    assert isinstance(layers, torch.nn.Module), f"a torchtitan decoder holds its blocks in `layers`: {type(model)}"
    return list(layers.children())
