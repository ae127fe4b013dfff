"""What is told after the first step of an optimizer: a summary, layers that were left, models that were passed by."""

from __future__ import annotations

import logging
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfine_fx
from memfine_fx.models import MixtralConfig, MixtralMoE

HIDDEN = 16


def layer() -> nn.Module:
    return MixtralMoE(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered"))


class Noisy(nn.Module):
    """Draws random numbers in its experts, which cannot be drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.table = nn.Parameter(torch.randn(4, HIDDEN, HIDDEN) * 0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.gate(hidden), -1).topk(2, -1)
        rows = torch.bmm(hidden.repeat_interleave(2, 0).unsqueeze(1), self.table[chosen.reshape(-1)]).squeeze(1)
        rows = torch.nn.functional.dropout(rows, 0.5)
        rows = torch.bmm(rows.unsqueeze(1), self.table[chosen.reshape(-1)]).squeeze(1)
        return (rows * weights.reshape(-1, 1)).view(-1, 2, HIDDEN).sum(1)


def model(*layers: nn.Module) -> Any:
    return nn.Sequential(*layers)


def optimized(one: nn.Module, budget: Any = None) -> Any:
    config = memfine_fx.Config(inner_backend="aot_eager", rows_per_chunk=5, memory_budget=budget)
    return memfine_fx.optimize(one, config=config)


def train(one: nn.Module, call: Any = None, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
    for _ in range(steps):
        (call or one)(torch.randn(9, HIDDEN)).square().sum().backward()
        optimizer.step()


def test_the_summary_is_logged_once_after_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memfine_fx"):
        train(optimized(model(layer(), layer()), budget="1GiB"))
    lines = [one.getMessage() for one in caplog.records if one.name == "memfine_fx"]
    assert len(lines) == 1
    assert lines[0].startswith("2 of 2 MoE layers chunked, ") and lines[0].endswith(" KiB predicted, budget 1GiB")


def test_layers_that_are_left_are_a_warning_with_the_reason() -> None:
    one = optimized(model(layer(), Noisy()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(one)
    told = [str(warning.message) for warning in caught if "MoE layers chunked" in str(warning.message)]
    assert len(told) == 1
    assert "1 of 2 MoE layers chunked" in told[0] and "random" in told[0]
    assert "print(memfine_fx.report(model))" in told[0]


def bypass(module: nn.Module, hidden: Tensor) -> Tensor:
    """Calls the layers one by one."""
    for one in module:  # type: ignore[attr-defined]
        hidden = one(hidden)
    return hidden


def test_a_model_that_training_passes_by_is_a_warning_that_says_what_to_do() -> None:
    one = optimized(model(layer(), layer()))
    with pytest.warns(UserWarning, match=r"Sequential has gradients, but none of its calls was ours.*one by one"):
        train(one, lambda hidden: bypass(one, hidden), steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(one, lambda hidden: bypass(one, hidden))


def test_a_forward_that_was_replaced_is_named_with_the_line_that_helps() -> None:
    one = optimized(model(layer(), layer()))
    one.forward = types.MethodType(bypass, one)
    with pytest.warns(UserWarning, match=r"replaced by bypass \(.*test_first_step.py:\d+\): call memfine_fx.optimize"):
        train(one, one.forward, steps=1)
    optimized(one)
    train(one, one.forward)
    assert memfine_fx.report(one).num_chunked == 2
