"""Packed linear layers that keep experts out of the graphs: what is said of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfine_fx
from memfine_fx.capture.quantized import hint_for_packed_layers
from memfine_fx.models.loops import LoopConfig, LoopMoE
from tests.integration.comparison import optimized_copy


class Breaking(nn.Linear):
    """A layer that no graph has, as other packages write theirs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(input)


def named(name: str) -> nn.Module:
    """A layer of a class by this name."""
    module, _, qualname = name.rpartition(".")
    return type(qualname, (Breaking,), {"__module__": module})(8, 8)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("bitsandbytes.nn.modules.Linear8bitLt", "load_in_4bit"),
        ("gptqmodel.nn_modules.qlinear.torch.TorchLinear", "made whole before"),
        ("awq.modules.linear.gemm.WQLinear_GEMM", "made whole before"),
    ],
)
def test_packed_layers_are_known_by_their_class(name: str, advice: str) -> None:
    assert advice in hint_for_packed_layers(nn.Sequential(nn.Linear(8, 8), named(name)))
    assert hint_for_packed_layers(nn.Sequential(nn.Linear(8, 8), Breaking(8, 8))) == ""


def test_the_warning_and_the_report_say_what_to_do() -> None:
    layer = LoopMoE(LoopConfig(hidden=8, expert_width=8, num_experts=2, top_k=1))
    for expert in layer.experts:
        expert.w1 = Breaking(8, 8, bias=False)
        expert.w1.quantization_scheme = "W4A16"
    optimized = optimized_copy(layer)
    with pytest.warns(UserWarning, match=r"CompressedTensorsConfig\(dequantize=True\)"):
        optimized(torch.randn(5, 8))
    assert any("compressed-tensors" in note for note in memfine_fx.report(optimized).notes)
