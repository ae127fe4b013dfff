"""Describe how a model is trained, and count the bytes that its optimizer takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from memfine_fx.compat.bitsandbytes import CODE_BOOK_BYTES, eight_bit_bytes
from memfine_fx.config import MemoryBudget, parse_budget
from memfine_fx.errors import ConfigError
from memfine_fx.memory.static import foreseen_state_bytes

__all__ = [
    "DTYPES",
    "TRAININGS",
    "OptimizerBytes",
    "OptimizerName",
    "Setup",
    "Train",
    "made_optimizer",
    "optimizer_bytes",
]

Train = Literal["full", "lora", "qlora"]
OptimizerName = Literal["adamw", "adamw8bit", "sgd", "adafactor"]
TRAININGS: dict[Train, str] = {"full": "full", "lora": "LoRA", "qlora": "QLoRA (NF4)"}
"""Names of the kinds of training in reports."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Setup:
    """The setup of one training step.

    Args:
        batch, seq: sequences, and tokens of each.
        train: all parameters; or LoRA adapters beside frozen ones, which "qlora" stores in 4 bits (see `adapters`).
        lora_r: their rank.
        targets: names of the linear layers, or of the expert weights, that get adapters; () for all linear layers but
            the head.
        dtype: of parameters, a key of `DTYPES`.
        optimizer: "adamw" and "adafactor" as torch.optim has them, "sgd" without momentum, "adamw8bit" of bitsandbytes.
        master_weights: fp32 copies of low-precision parameters, which the optimizer works on.
        checkpointing: gradient checkpointing of every layer, as the model offers it.
        fsdp: ranks over which parameters, gradients and the optimizer's state are sharded; bytes are those of one.
        expert_parallel: ranks over which experts are spread; bytes are those of one.
        device: "cpu" or "cuda": whose attention is counted where a CPU has no fused kernel.
        accumulate: micro-batches of `batch` sequences whose gradients are added before the optimizer steps.

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
    fsdp: int = 1
    expert_parallel: int = 1
    device: str = "cpu"
    accumulate: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "lora_r", "fsdp", "expert_parallel", "accumulate"):
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
        if self.fsdp > 1 and self.expert_parallel > 1:
            raise ConfigError(f"fsdp={self.fsdp} with expert_parallel={self.expert_parallel}: give one of them")
        if self.seq < 2:
            raise ConfigError(f"seq={self.seq}: a language model's loss needs two tokens")
        if isinstance(self.budget, float):
            raise ConfigError(f"memory_budget={self.budget!r}: there is no device to take a fraction of; give bytes")
        parse_budget(self.budget)


@dataclass(frozen=True)
class OptimizerBytes:
    """The memory of an optimizer in bytes.

    Args:
        state: from its first step on, for good.
        masters: fp32 copies of the parameters.
        working: while it steps, beside gradients.
    """

    state: int
    masters: int
    working: int


_TEMPORARIES = {"adamw": 2, "adamw8bit": 0, "sgd": 0, "adafactor": 1}
"""Tensors like a parameter that are alive at once while an optimizer updates it, one parameter after another. Where
there are any, torch's loops hold the last one until the next parameter's are made."""
_SCALAR_BYTES = {"adamw": 4, "adamw8bit": 0, "sgd": 0, "adafactor": 4}
"""Bytes of the step count in each parameter's state."""


def optimizer_bytes(parameters: Iterable[torch.nn.Parameter], setup: Setup) -> OptimizerBytes:
    """Return the bytes of an optimizer over parameters that require a gradient; fake ones allocate nothing."""
    trained = [param for param in parameters if param.requires_grad]
    if not trained:
        raise ConfigError("no parameter of the model wants a gradient")
    low = [param for param in trained if param.element_size() < 4]
    masters = sum(4 * param.numel() for param in low) if setup.master_weights else 0
    state = _SCALAR_BYTES[setup.optimizer] * len(trained)
    state += sum(_state_bytes(param, setup) for param in trained)
    state += 2 * CODE_BOOK_BYTES if setup.optimizer == "adamw8bit" else 0
    sizes, temporaries = [param.numel() * _item_bytes(param, setup) for param in trained], _TEMPORARIES[setup.optimizer]
    before = [0, *sizes] if temporaries else [0] * len(sizes)
    working = max(temporaries * size + previous for size, previous in zip(sizes, before, strict=False))
    return OptimizerBytes(state, masters, working)


def _item_bytes(parameter: torch.nn.Parameter, setup: Setup) -> int:
    """Return the bytes of each number that an optimizer computes with."""
    return 4 if setup.master_weights else parameter.element_size()


def _state_bytes(parameter: torch.nn.Parameter, setup: Setup) -> int:
    """Return the bytes of an optimizer's state for one parameter, without the step count."""
    item_bytes = _item_bytes(parameter, setup)
    elements = parameter.numel()
    if setup.optimizer == "adamw8bit":
        return eight_bit_bytes(elements, 2)
    if setup.optimizer == "adafactor" and parameter.dim() > 1:
        rows, columns = parameter.shape[-2:]
        return elements // (rows * columns) * (rows + columns) * item_bytes
    if setup.optimizer == "adafactor":
        return elements * item_bytes
    optimizer = made_optimizer([parameter], setup.optimizer)
    foreseen = foreseen_state_bytes([parameter], [optimizer]) - _SCALAR_BYTES[setup.optimizer]
    return foreseen // parameter.element_size() * item_bytes


def made_optimizer(parameters: list[torch.nn.Parameter], name: OptimizerName) -> torch.optim.Optimizer:
    """Return a torch optimizer of these parameters, whose class tells its state; that is allocated at its first step.

    Names other than "adamw" get an SGD without momentum, which has no state.
    """
    optimizer_class: Any = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
    optimizer: torch.optim.Optimizer = optimizer_class(parameters, lr=1e-4)
    return optimizer
