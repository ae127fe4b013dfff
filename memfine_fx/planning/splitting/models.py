"""Two small models to split, for `memfine plan split --model cnn|transformer`, and the loading of a user's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from memfine_fx.errors import ConfigError

__all__ = ["load_model", "small_cnn", "small_transformer"]


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


class _Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))
        return cast(Tensor, x + self.ffn(self.norms[1](x)))


def small_cnn(batch: int = 8, size: int = 16) -> tuple[nn.Module, Tensor]:
    """A residual CNN for 10 classes, with a batch of images [batch, 3, size, size]."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), _Residual(8), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), _Residual(16), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * (size // 4) ** 2, 10),
    )  # fmt: skip
    return model, torch.randn(batch, 3, size, size)


def small_transformer(batch: int = 4, seq: int = 16, hidden: int = 32, layers: int = 3) -> tuple[nn.Module, Tensor]:
    """A causal transformer over 64 tokens, with a batch of token ids [batch, seq]."""
    blocks = [_Block(hidden) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(64, hidden), *blocks, nn.LayerNorm(hidden), nn.Linear(hidden, 64))
    return model, torch.randint(0, 64, (batch, seq))


def load_model(target: str) -> tuple[nn.Module, Tensor]:
    """A model with an example batch: "cnn", "transformer" or "path/to/file.py:factory" that returns such a pair.

    Raises:
        ConfigError: there is no such model, or the factory returns something else.
    """
    builtin: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"cnn": small_cnn, "transformer": small_transformer}
    if target in builtin:
        return builtin[target]()
    path, _, name = target.rpartition(":")
    if not path.endswith(".py") or not Path(path).exists():
        raise ConfigError(f"--model {target!r}: expected cnn, transformer or an existing path/to/file.py:factory")
    spec = importlib.util.spec_from_file_location("memfine_split_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(f"--model {target!r}: {path} has no callable {name!r}")
    made = factory()
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and isinstance(made[1], Tensor)
    ):
        raise ConfigError(
            f"--model {target!r}: {name} returned {type(made).__name__}; expected (module, example tensor)"
        )
    return made[0], made[1]
