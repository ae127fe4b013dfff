"""The hand-written layers of the coverage table: `memfine_fx.models`, one entry a spelling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from memfine_fx import models

__all__ = ["SPELLINGS"]

_HIDDEN, _TOKENS = 32, 128


def _layer(build: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (build(), torch.randn(_TOKENS, _HIDDEN))


SPELLINGS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gathered weights, SwiGLU": _layer(
        lambda: models.MixtralMoE(models.MixtralConfig(hidden=_HIDDEN, expert_width=48, spelling="gathered"))
    ),
    "gathered weights, shared expert, sigmoid router": _layer(
        lambda: models.DeepseekMoE(models.DeepseekConfig(hidden=_HIDDEN, expert_width=48, spelling="gathered"))
    ),
    "gathered weights, biases, clamped interleaved gate": _layer(
        lambda: models.GptOssMoE(models.GptOssConfig(hidden=_HIDDEN, expert_width=48, spelling="gathered"))
    ),
    "expert loop over a ModuleList": _layer(lambda: models.NaiveMoE(models.NaiveConfig(hidden=_HIDDEN))),
    "one-hot dispatch with capacity": _layer(lambda: models.SwitchMoE(models.SwitchConfig(hidden=_HIDDEN))),
}
