"""The hand-written layers of the coverage table: `memfine_fx.models`, one entry a spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from memfine_fx import models
from memfine_fx.models import dense, dense_loop, handwritten, listed_slots, loops, padded, published

__all__ = ["SPELLINGS"]

_HIDDEN = 32
_TOKENS = 128

Build = Callable[[], tuple[nn.Module, Tensor]]


def _layer(layer_class: Any, config_class: Any, *, shape: tuple[int, ...] = (_TOKENS,), **fields: Any) -> Build:
    """The layer at toy width and its tokens, of shape (*shape, H)."""

    def build() -> tuple[nn.Module, Tensor]:
        return layer_class(config_class(hidden=_HIDDEN, expert_width=48, **fields)), torch.randn(*shape, _HIDDEN)

    return build


SPELLINGS: dict[str, Build] = {
    "gathered weights, SwiGLU": _layer(models.MixtralMoE, models.MixtralConfig, spelling="gathered"),
    "gathered weights, shared expert, sigmoid router": _layer(
        models.DeepseekMoE, models.DeepseekConfig, spelling="gathered"
    ),
    "gathered weights, biases, clamped interleaved gate": _layer(
        models.GptOssMoE, models.GptOssConfig, spelling="gathered"
    ),
    "gathered weights by einsum": _layer(models.IndexedMoE, models.IndexedConfig, shape=(4, 32)),
    "gathered weights by matmul": _layer(models.IndexedMoE, models.IndexedConfig, shape=(4, 32), uses_matmul=True),
    "expert loop over a ModuleList": _layer(models.NaiveMoE, models.NaiveConfig),
    **{
        f"expert loop, {spelling}": _layer(models.LoopMoE, models.LoopConfig, spelling=spelling)
        for spelling in get_args(loops.LoopSpelling)
    },
    **{
        f"list of experts, {spelling}": _layer(
            models.HandwrittenMoE, models.HandwrittenConfig, shape=(4, 32), spelling=spelling
        )
        for spelling in get_args(handwritten.HandwrittenSpelling)
    },
    **{
        f"list of experts, {spelling}": _layer(
            models.PublishedMoE, models.PublishedConfig, shape=(4, 32), spelling=spelling
        )
        for spelling in get_args(published.PublishedSpelling)
    },
    **{
        f"slots, {spelling}": _layer(models.PaddedMoE, models.PaddedConfig, spelling=spelling)
        for spelling in get_args(padded.PaddedSpelling)
    },
    **{
        f"slots, list of experts, {spelling}": _layer(
            models.ListedSlotsMoE, models.ListedSlotsConfig, spelling=spelling
        )
        for spelling in get_args(listed_slots.ListedSlotsSpelling)
    },
    **{
        f"every expert on every token, loop, {spelling}": _layer(
            models.DenseLoopMoE, models.DenseLoopConfig, spelling=spelling
        )
        for spelling in get_args(dense_loop.LoopSpelling)
    },
    **{
        f"every expert on every token, {weighting}{' by einsum' if uses_einsum else ''}": _layer(
            models.DenseMoE, models.DenseConfig, weighting=weighting, uses_einsum=uses_einsum
        )
        for weighting in get_args(dense.Weighting)
        for uses_einsum in (False, True)
    },
    "scores on the input, bmm over all experts": _layer(models.Llama4MoE, models.Llama4Config),
    "one-hot dispatch with capacity": _layer(models.SwitchMoE, models.SwitchConfig),
    "one-hot dispatch with capacity, biases": _layer(models.SwitchMoE, models.SwitchConfig, has_biases=True),
    "capacity buffer and bmm": _layer(models.CapacityMoE, models.CapacityConfig),
    "zero experts": _layer(models.ZeroExpertsMoE, models.ZeroExpertsConfig),
    **{
        f"experts, {variant.replace('_', ' ')}": _layer(models.VariantMoE, models.VariantConfig, variant=variant)
        for variant in models.VARIANTS
    },
}
