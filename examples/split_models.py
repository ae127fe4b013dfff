"""Two small models to split: `memfine plan split --model examples/split_models.py:small_cnn` (or small_transformer)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
        return x + self.ffn(self.norms[1](x))


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
