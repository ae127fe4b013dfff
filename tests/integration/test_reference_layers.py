"""The reference layers in plain torch: raised, or refused with the reason and left exact."""

from __future__ import annotations

import copy

import pytest
import torch

import memfine_fx
from memfine_fx.models import (
    DeepseekConfig,
    DeepseekMoE,
    GptOssConfig,
    GptOssMoE,
    MixtralConfig,
    MixtralMoE,
    NaiveConfig,
    NaiveMoE,
)
from tests.integration.comparison import assert_same_step, optimized_copy, run_step

RAISED = {
    "mixtral": lambda: MixtralMoE(MixtralConfig(hidden=16, expert_width=24, spelling="gathered")),
    "deepseek": lambda: DeepseekMoE(DeepseekConfig(hidden=16, expert_width=24, spelling="gathered")),
    "gpt_oss": lambda: GptOssMoE(GptOssConfig(hidden=16, expert_width=24, spelling="gathered")),
    "naive": lambda: NaiveMoE(NaiveConfig(hidden=16)),
}


@pytest.mark.parametrize(("name", "axis"), list(zip(RAISED, ("rows", "tokens", "rows", "tokens"), strict=True)))
def test_layers_are_chunked_exactly(name: str, axis: str) -> None:
    layer = RAISED[name]()
    optimized = optimized_copy(layer, axis=axis, rows_per_chunk=6)
    for num_tokens in (19, 4):
        assert_same_step(optimized, layer, {"hidden": torch.randn(num_tokens, 16)})
    assert memfine_fx.report(optimized).num_chunked == 1


def test_the_grouped_bf16_layer_is_chunked() -> None:
    layer = MixtralMoE(MixtralConfig(hidden=32, expert_width=64)).to(torch.bfloat16)
    optimized = optimized_copy(layer, rows_per_chunk=8)
    run_step(optimized, {"hidden": torch.randn(30, 32).to(torch.bfloat16)})
    (region,) = memfine_fx.report(optimized).regions
    assert region.status == "chunked"
    assert region.family == "grouped"


def test_two_calls_of_one_layer_accumulate_its_gradients() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = RAISED["mixtral"]()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.tanh(self.layer(hidden)))

    model = Twice()
    optimized = optimized_copy(model, rows_per_chunk=6)
    assert_same_step(optimized, model, {"hidden": torch.randn(19, 16)})


def test_layers_with_equal_bodies_share_one_compilation() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(RAISED["mixtral"]() for _ in range(3))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = hidden + layer(hidden)
            return hidden

    optimized = optimized_copy(Model())
    run_step(optimized, {"hidden": torch.randn(9, 16)})
    regions = memfine_fx.report(optimized).regions
    assert len(regions) == 3
    assert len({region.body_key for region in regions}) == 1


def test_an_optimized_layer_can_be_copied_and_optimized_again() -> None:
    layer = RAISED["mixtral"]()
    optimized = optimized_copy(layer)
    inputs = {"hidden": torch.randn(9, 16)}
    run_step(optimized, inputs)
    again = memfine_fx.optimize(copy.deepcopy(optimized), inner_backend="eager")
    assert_same_step(again, layer, inputs)
