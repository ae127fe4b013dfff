"""How a model is meant to be trained, and what optimizers take for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from memfine_fx.config import MemoryBudget, parse_budget
from memfine_fx.errors import ConfigError
from memfine_fx.memory.static import foreseen_state_bytes

__all__ = ["DTYPES", "OptimizerBytes", "OptimizerName", "Setup", "Train", "optimizer_bytes"]

Train = Literal["full", "lora"]
OptimizerName = Literal["adamw", "sgd"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """One training step.

    Args:
        batch, seq: sequences, and tokens of each.
        train: all parameters, or LoRA adapters beside frozen ones.
        lora_r: their rank.
        targets: names of the linear layers that get adapters; () for all of them but the head.
        dtype: of parameters, a key of `DTYPES`.
        optimizer: "adamw" as torch.optim.AdamW has it, "sgd" without momentum.
        master_weights: fp32 copies of low-precision parameters, which the optimizer works on.
        checkpointing: gradient checkpointing of every layer, as the model offers it.

    Raises:
        ConfigError: a value that cannot be; the message names it.
    """

    batch: int = 1
    seq: int = 4096
    train: Train = "full"
    lora_r: int = 16
    targets: tuple[str, ...] = ()
    dtype: str = "bf16"
    optimizer: OptimizerName = "adamw"
    master_weights: bool = False
    checkpointing: bool = False
    budget: MemoryBudget = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "lora_r"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(f"{name}={value!r} must be a positive int")
        choices: tuple[tuple[str, tuple[str, ...]], ...] = (
            ("train", get_args(Train)),
            ("dtype", tuple(DTYPES)),
            ("optimizer", get_args(OptimizerName)),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; expected one of {list(known)}")
        if self.seq < 2:
            raise ConfigError(f"seq={self.seq}: a language model's loss needs two tokens")
        if isinstance(self.budget, float):
            raise ConfigError(f"budget={self.budget!r}: there is no device to take a fraction of; give bytes")
        parse_budget(self.budget)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer takes.

    Args:
        state: from its first step on, for good.
        masters: fp32 copies of the parameters.
        working: while it steps, beside gradients.
    """

    state: int
    masters: int
    working: int


_TEMPORARIES = {"adamw": 2, "sgd": 0}
"""Tensors like a parameter that are alive at once while torch's optimizer updates it, one parameter after another."""
_SCALAR_BYTES = {"adamw": 4, "sgd": 0}
"""The count of steps that is kept of each parameter."""


def optimizer_bytes(parameters: Iterable[torch.nn.Parameter], setup: Setup) -> OptimizerBytes:
    """Bytes of an optimizer over the parameters that want a gradient; nothing is allocated if they are fake."""
    trained = [one for one in parameters if one.requires_grad]
    if not trained:
        raise ConfigError("no parameter of the model wants a gradient")
    low = [one for one in trained if one.element_size() < 4]
    masters = sum(4 * one.numel() for one in low) if setup.master_weights else 0
    optimizer = _optimizer(trained, setup.optimizer)
    state = foreseen_state_bytes(trained, [optimizer]) + _SCALAR_BYTES[setup.optimizer] * len(trained)
    if setup.master_weights and low:
        state = state * 4 // low[0].element_size()
    widest = max(one.numel() * (4 if setup.master_weights else one.element_size()) for one in trained)
    return OptimizerBytes(state, masters, _TEMPORARIES[setup.optimizer] * widest)


def _optimizer(parameters: list[torch.nn.Parameter], name: OptimizerName) -> torch.optim.Optimizer:
    made: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    optimizer: torch.optim.Optimizer = made(parameters, lr=1e-4)
    return optimizer
