"""The dense, indexed and capacity reference layers against a plain loop over tokens and their experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memfine_fx.models import (
    CapacityConfig,
    CapacityMoE,
    DenseConfig,
    DenseLoopConfig,
    DenseLoopMoE,
    DenseMoE,
    HashedConfig,
    HashedMoE,
    IndexedConfig,
    IndexedMoE,
    ListedSlotsConfig,
    ListedSlotsMoE,
    Llama4Config,
    Llama4MoE,
    PaddedConfig,
    PaddedMoE,
    PublishedConfig,
    PublishedMoE,
    TorchtitanConfig,
    TorchtitanMoE,
    VariantConfig,
    VariantMoE,
    ZeroExpertsConfig,
    ZeroExpertsMoE,
)
from memfine_fx.models.dense import Weighting
from memfine_fx.models.dense_loop import LoopSpelling
from memfine_fx.models.listed_slots import ListedSlotsSpelling
from memfine_fx.models.published import PublishedSpelling

SIZES: dict[str, Any] = dict(hidden=16, expert_width=24, num_experts=4)
Route = Callable[[Tensor], list[tuple[int, Tensor]]]


def softmax_top(layer: Any, top_k: int, *, renormalised: bool) -> Route:
    def route(token: Tensor) -> list[tuple[int, Tensor]]:
        probability = torch.softmax(layer.gate(token), dim=-1)
        values, index = probability.topk(top_k)
        total = values.sum() if renormalised else 1.0
        return [(int(e), value / total) for e, value in zip(index, values, strict=True)]

    return route


def loop(tokens: Tensor, route: Route, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """[T,H]: each token's experts one by one, weighted."""
    return torch.stack([sum((w * expert(e, x) for e, w in route(x)), start=torch.zeros_like(x)) for x in tokens])


def assert_close(layer: torch.nn.Module, expected: Callable[[Tensor], Tensor], num_tokens: int = 13) -> None:
    layer.double()
    tokens = torch.randn(num_tokens, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(tokens), expected(tokens), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("uses_einsum", [True, False])
@pytest.mark.parametrize("weighting", get_args(Weighting))
def test_dense_layers_are_the_loop_over_chosen_experts(weighting: Weighting, uses_einsum: bool) -> None:
    layer = DenseMoE(DenseConfig(**SIZES, weighting=weighting, uses_einsum=uses_einsum))

    def expert(e: int, x: Tensor) -> Tensor:
        return F.gelu(x @ layer.wi[e] + layer.bi[e]) @ layer.wo[e] + layer.bo[e]

    is_normalised = weighting in ("mask", "masked_softmax")
    assert_close(layer, lambda tokens: loop(tokens, softmax_top(layer, 2, renormalised=is_normalised), expert))


@pytest.mark.parametrize("spelling", get_args(LoopSpelling))
def test_dense_loops_are_the_loop_over_chosen_experts(spelling: LoopSpelling) -> None:
    layer = DenseLoopMoE(DenseLoopConfig(**SIZES, spelling=spelling))
    route = softmax_top(layer, 2, renormalised=True)
    assert_close(layer, lambda tokens: loop(tokens, route, lambda e, x: layer.experts[e](x)))


@pytest.mark.parametrize("spelling", get_args(PublishedSpelling))
def test_published_loops_are_the_loop_over_chosen_experts(spelling: PublishedSpelling) -> None:
    layer = PublishedMoE(PublishedConfig(**SIZES, spelling=spelling))
    route = softmax_top(layer, 2, renormalised=True)

    def expected(tokens: Tensor) -> Tensor:
        chosen = loop(tokens, route, lambda e, x: layer.experts[e](x))
        if spelling == "valid":  # tokens that are padding reach no expert
            chosen = chosen * (tokens[:, 0] > -1.0).unsqueeze(-1)
        return chosen if layer.base is None else layer.base(tokens) + 2 * chosen

    assert_close(layer, expected)


@pytest.mark.parametrize("spelling", get_args(ListedSlotsSpelling))
def test_slots_for_all_rows_are_the_loop_over_chosen_experts(spelling: ListedSlotsSpelling) -> None:
    layer = ListedSlotsMoE(ListedSlotsConfig(**SIZES, spelling=spelling, capacity_factor=4.0))
    route = softmax_top(layer, 2, renormalised=True)
    assert_close(layer, lambda tokens: loop(tokens, route, lambda e, x: layer.experts[e](x)))


def test_padded_rows_are_the_loop_over_chosen_experts() -> None:
    layer = PaddedMoE(PaddedConfig(**SIZES))

    def expert(e: int, x: Tensor) -> Tensor:
        return (F.silu(x @ layer.w1[e]) * (x @ layer.w3[e])) @ layer.w2[e]

    assert_close(layer, lambda tokens: loop(tokens, softmax_top(layer, 2, renormalised=True), expert))


def test_experts_that_choose_take_the_tokens_that_suit_them_best() -> None:
    layer = PaddedMoE(PaddedConfig(**SIZES, spelling="choice"))

    def expected(tokens: Tensor) -> Tensor:
        probability = torch.softmax(layer.gate(tokens), dim=-1)
        out = torch.zeros_like(tokens)
        for e in range(4):
            for t in probability[:, e].argsort(descending=True)[: tokens.shape[0] * 2 // 4]:
                x = tokens[t]
                out[t] += probability[t, e] * ((F.silu(x @ layer.w1[e]) * (x @ layer.w3[e])) @ layer.w2[e])
        return out

    assert_close(layer, expected, num_tokens=12)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_llama4_weighs_the_inputs_of_its_chosen_experts(top_k: int) -> None:
    layer = Llama4MoE(Llama4Config(**SIZES, top_k=top_k))

    def expected(tokens: Tensor) -> Tensor:
        rows = []
        for x in tokens:
            values, index = layer.gate(x).topk(top_k)
            total = layer.shared_expert(x)
            for e, value in zip(index, values, strict=True):
                gate, up = ((x * value.sigmoid()) @ layer.gate_up_proj[e]).chunk(2)
                total = total + (up * F.silu(gate)) @ layer.down_proj[e]
            rows.append(total)
        return torch.stack(rows)

    assert_close(layer, expected)


@pytest.mark.parametrize("is_before", [True, False])
def test_torchtitan_is_the_loop_plus_its_shared_expert(is_before: bool) -> None:
    layer = TorchtitanMoE(TorchtitanConfig(**SIZES, scores_before_experts=is_before, compute_dtype=None))

    def expected(tokens: Tensor) -> Tensor:
        rows = []
        for x in tokens:
            scores = layer.gate(x).sigmoid()
            values, index = scores.topk(2)
            total = layer.shared_expert(x)  # type: ignore[misc]  # it has one
            for e, value in zip(index, values / values.sum(), strict=True):
                inputs = x * value if is_before else x
                out = (F.silu(layer.w1[e] @ inputs) * (layer.w3[e] @ inputs)) @ layer.w2[e].t()
                total = total + (out if is_before else out * value)
            rows.append(total)
        return torch.stack(rows)

    tokens = torch.randn(13, 16)
    torch.testing.assert_close(layer(tokens), expected(tokens), rtol=1e-4, atol=1e-5)
    assert float(layer.tokens_per_expert.sum()) == 13 * 2


@pytest.mark.parametrize("uses_matmul", [True, False])
def test_indexed_weights_are_the_loop(uses_matmul: bool) -> None:
    layer = IndexedMoE(IndexedConfig(**SIZES, uses_matmul=uses_matmul)).double()

    def expert(e: int, x: Tensor) -> Tensor:
        return (F.silu(x @ layer.w1[e]) * (x @ layer.w3[e])) @ layer.w2[e]

    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = loop(hidden.view(-1, 16), softmax_top(layer, 2, renormalised=True), expert).view(2, 5, 16)
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-6, atol=1e-8)


def test_a_capacity_for_all_is_the_loop_and_a_small_one_drops_the_late() -> None:
    layer = CapacityMoE(CapacityConfig(**SIZES, capacity_factor=4.0))

    def expert(e: int, x: Tensor) -> Tensor:
        return (F.silu(x @ layer.w1[e]) * (x @ layer.w3[e])) @ layer.w2[e]

    assert_close(layer, lambda tokens: loop(tokens, softmax_top(layer, 2, renormalised=True), expert))
    small = CapacityMoE(CapacityConfig(**SIZES, capacity_factor=0.25))
    with torch.no_grad():
        small.gate.weight.zero_()
    out = small(torch.randn(16, 16))
    assert (out[:2] != 0).any(dim=-1).all()
    assert (out[2:] == 0).all()


def test_identity_classes_add_the_token_itself() -> None:
    layer = ZeroExpertsMoE(ZeroExpertsConfig(**SIZES, num_zero_experts=2))

    def expert(e: int, x: Tensor) -> Tensor:
        if e >= 4:
            return x
        gate, up = (layer.experts.gate_up_proj[e] @ x).chunk(2)
        return layer.experts.down_proj[e] @ (F.silu(gate) * up)

    assert_close(layer, lambda tokens: loop(tokens, softmax_top(layer, 2, renormalised=True), expert), num_tokens=29)


def test_hashed_layers_take_the_expert_of_the_table() -> None:
    layer = HashedMoE(HashedConfig(**SIZES)).double()
    ids = torch.randint(64, (2, 5))
    hidden = layer.embedding(ids)
    expected = torch.stack(
        [
            x + F.relu(x @ layer.wi[e]) @ layer.wo[e]
            for x, e in zip(hidden.view(-1, 16), layer.table[ids.view(-1)], strict=True)
        ]
    )
    torch.testing.assert_close(layer(ids), expected.view(2, 5, 16), rtol=1e-6, atol=1e-8)


def test_relu_squared_experts_have_no_gate() -> None:
    layer = VariantMoE(VariantConfig("relu_squared", **SIZES))

    def expert(e: int, x: Tensor) -> Tensor:
        return F.relu(x @ layer.experts.up[e][:, :24]).square() @ layer.experts.down[e]

    assert_close(layer, lambda tokens: loop(tokens, softmax_top(layer, 2, renormalised=True), expert))


def test_an_unknown_variant_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="variant must be one of"):
        VariantConfig("swish")  # type: ignore[arg-type]  # that is the point
