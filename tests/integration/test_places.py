"""Where regions may stand: several in a layer, shared between layers, nested checkpoints, encoder and decoder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memfine_fx
from memfine_fx.models import (
    DenseConfig,
    DenseMoE,
    HashedConfig,
    HashedMoE,
    Llama4Config,
    Llama4MoE,
    MixtralConfig,
    MixtralMoE,
    SwitchConfig,
    SwitchMoE,
    ZeroExpertsConfig,
    ZeroExpertsMoE,
)
from tests.integration.comparison import assert_same_step, optimized_copy

H = 16


def moe(top_k: int = 2) -> MixtralMoE:
    return MixtralMoE(MixtralConfig(hidden=H, expert_width=24, num_experts=4, top_k=top_k, spelling="gathered"))


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.layer(self.norm(hidden))


class TwoInOneLayer(nn.Module):
    """Two MoE layers side by side on the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.left = moe()
        self.right = Llama4MoE(Llama4Config(hidden=H, expert_width=24, num_experts=4))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        return hidden + self.left(normed) + self.right(normed)


class SharedExperts(nn.Module):
    """Layers with routers of their own and one set of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(moe()), Block(moe())
        self.second.layer.experts = self.first.layer.experts  # type: ignore[union-attr]  # a MixtralMoE

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(self.first(hidden))


class NestedCheckpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(moe()), Block(moe())

    def forward(self, hidden: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return checkpoint(self.second, x, use_reentrant=False)

        return checkpoint(lambda x: inner(self.first(x)), hidden, use_reentrant=False)


class EncoderDecoder(nn.Module):
    """An encoder and a decoder with an MoE each, and attention from one to the other between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(moe()), Block(moe())
        self.attention = nn.MultiheadAttention(H, 2, batch_first=True)

    def forward(self, hidden: Tensor, queries: Tensor) -> Tensor:
        memory = self.encoder(hidden)
        attended, _ = self.attention(queries, memory, memory, need_weights=False)
        return self.decoder(queries + attended)


class MixedSpellings(nn.Module):
    """Dense, capacity, routed and identity experts one after the other: each seed keeps its own experts."""

    def __init__(self) -> None:
        super().__init__()
        sizes = dict(hidden=H, expert_width=24, num_experts=4)
        layers = [
            DenseMoE(DenseConfig(**sizes)),  # type: ignore[arg-type]  # sizes
            SwitchMoE(SwitchConfig(**sizes)),  # type: ignore[arg-type]  # sizes
            moe(),
            DenseMoE(DenseConfig(**sizes, uses_einsum=False)),  # type: ignore[arg-type]  # sizes
            ZeroExpertsMoE(ZeroExpertsConfig(**sizes)),  # type: ignore[arg-type]  # sizes
        ]
        self.layers = nn.Sequential(*map(Block, layers))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)  # type: ignore[no-any-return]  # a tensor


class OneChoice(nn.Module):
    """K = 1 with a weight that is not normalised to one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, 4)
        self.experts = moe().experts

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, H)
        weight, index = self.gate(tokens).sigmoid().topk(1, dim=-1)
        return self.experts(tokens, index, weight).view(hidden.shape)  # type: ignore[no-any-return]  # a tensor


MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "two in one layer": (2, TwoInOneLayer),
    "experts shared between layers": (2, SharedExperts),
    "nested checkpoints": (2, NestedCheckpoints),
    "identity experts": (1, lambda: ZeroExpertsMoE(ZeroExpertsConfig(hidden=H, expert_width=24, num_experts=4))),
    "one choice": (1, OneChoice),
    "every expert chosen": (1, lambda: moe(top_k=4)),
    "dense, every expert chosen": (1, lambda: DenseMoE(DenseConfig(H, 24, 4, top_k=4, uses_einsum=False))),
    "mixed spellings": (5, MixedSpellings),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_region_is_chunked_and_gradients_equal_eager(name: str) -> None:
    num_regions, make = MODELS[name]
    model = make()
    inner = "aot_eager" if name in ("experts shared between layers", "nested checkpoints") else "eager"
    optimized = optimized_copy(model, inner=inner, rows_per_chunk=5)
    assert_same_step(optimized, model, {"hidden": torch.randn(2, 9, H)})
    assert memfine_fx.report(optimized).num_chunked == num_regions


def test_an_encoder_decoder_with_cross_attention_is_exact() -> None:
    model = EncoderDecoder()
    optimized = optimized_copy(model, inner="aot_eager", rows_per_chunk=5)
    assert_same_step(optimized, model, {"hidden": torch.randn(2, 9, H), "queries": torch.randn(2, 5, H)})
    assert memfine_fx.report(optimized).num_chunked == 2


def test_hash_routing_by_a_table_is_chunked_exactly() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hashed = HashedMoE(HashedConfig(vocabulary=32, hidden=H, expert_width=24, num_experts=4))
            self.rest = Block(moe())

        def forward(self, token_ids: Tensor) -> Tensor:
            return self.rest(self.hashed(token_ids))  # type: ignore[no-any-return]  # a tensor

    model = Model()
    optimized = optimized_copy(model, rows_per_chunk=5)
    assert_same_step(optimized, model, {"token_ids": torch.randint(32, (2, 9))})
    assert memfine_fx.report(optimized).num_chunked == 2
