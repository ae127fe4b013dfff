"""Models of fake tensors for these tests."""

from __future__ import annotations

import torch

from memfine_fx.compat.tensors import FakeTensorMode
from memfine_fx.demo.training import ModelSizes, build_causal_lm


def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def qwen3_moe(sizes: ModelSizes, mode: FakeTensorMode) -> torch.nn.Module:
    with mode:
        model: torch.nn.Module = build_causal_lm(sizes, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    return model
