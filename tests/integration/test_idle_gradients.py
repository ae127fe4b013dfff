"""`Config(idle_gradients="none")`: experts without rows have no gradient, as in a loop that skips them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memfine_fx
from tests.integration.comparison import FP32_TOLERANCE, relative_error

HIDDEN, FFN, NUM_EXPERTS, TOKENS, IDLE = 8, 6, 4, 13, 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(nn.functional.silu(self.up(rows)))
        return result


class Skipping(nn.Module):
    """A list of experts, those without tokens skipped; `bias` of the router decides which of them are idle."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))

    def forward(self, tokens: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk((self.router(tokens) + bias).softmax(-1), 2)
        total = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, choices = torch.where(ids == number)
            if rows.numel() == 0:
                continue
            total.index_add_(0, rows, expert(tokens[rows]) * weights[rows, choices, None])
        return total


class Stacked(Skipping):
    """Experts' weights in one tensor, of which every entry has a gradient, in eager code too."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, FFN) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, FFN, HIDDEN) / 3)

    def forward(self, tokens: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk((self.router(tokens) + bias).softmax(-1), 2)
        rows = ids.flatten()
        hidden = nn.functional.silu(tokens.repeat_interleave(2, 0).unsqueeze(1) @ self.up[rows]) @ self.down[rows]
        return (hidden.view(-1, 2, HIDDEN) * weights.unsqueeze(-1)).sum(1)


def biases(*idle: int) -> torch.Tensor:
    return torch.zeros(NUM_EXPERTS).index_fill(0, torch.tensor(idle, dtype=torch.int64), -1e4)


def pair(inner: str, layer: type[Skipping] = Skipping, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = layer()
    reference = copy.deepcopy(model)
    options = {"idle_gradients": "none", **options}
    memfine_fx.optimize(model, inner_backend=inner, config=memfine_fx.Config(**options))
    return model, reference


def assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    assert memfine_fx.report(model).num_chunked == 1
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None and expected.grad is not None:
            assert relative_error(parameter.grad, expected.grad) < FP32_TOLERANCE, name


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_idle_experts_have_no_gradient(inner: str) -> None:
    model, reference = pair(inner)
    for idle in ((IDLE,), (0, 1), ()):  # of each step of its own
        for each in (model, reference):
            each.zero_grad()
            torch.manual_seed(1)
            each(torch.randn(TOKENS, HIDDEN), biases(*idle)).square().mean().backward()
        assert_equal_gradients(model, reference)
    assert all(parameter.grad is not None for parameter in model.parameters()), "no expert is idle in the last step"


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ],
    ids=["AdamW", "momentum"],
)
def test_optimizers_leave_idle_experts_alone(inner: str, optimizer_of: Callable[..., torch.optim.Optimizer]) -> None:
    model, reference = pair(inner)
    for each in (model, reference):
        optimizer = optimizer_of(each.parameters())
        for step, idle in enumerate(((), (IDLE,), (IDLE,), (0, IDLE))):
            torch.manual_seed(step)
            each(torch.randn(TOKENS, HIDDEN), biases(*idle)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), expected in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert relative_error(parameter, expected[1]) < 10 * FP32_TOLERANCE, name  # steps of Adam magnify


def test_micro_batches_leave_gradients_of_idle_experts_as_they_are() -> None:
    model, reference = pair("aot_eager")
    for each in (model, reference):
        for step, idle in enumerate(((0,), (IDLE,), (0, 1))):
            torch.manual_seed(step)
            each(torch.randn(TOKENS, HIDDEN), biases(*idle)).square().mean().backward()
    assert_equal_gradients(model, reference)


def test_a_parameter_with_a_hook_has_zeros() -> None:
    model, _ = pair("aot_eager")
    hooked, seen = model.experts[IDLE].down.weight, list[torch.Tensor]()  # type: ignore[union-attr, index]
    hooked.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    model(torch.randn(TOKENS, HIDDEN), biases(IDLE)).square().mean().backward()
    assert len(seen) == 1 and not seen[0].any()
    assert model.experts[IDLE].up.weight.grad is None  # type: ignore[union-attr, index]


def test_tables_have_zeros_as_in_eager_code() -> None:
    model, reference = pair("aot_eager", Stacked)
    for each in (model, reference):
        torch.manual_seed(1)
        each(torch.randn(TOKENS, HIDDEN), biases(IDLE)).square().mean().backward()
    assert_equal_gradients(model, reference)


def test_by_default_idle_experts_have_zeros() -> None:
    model, _ = pair("aot_eager", idle_gradients="zero")
    model(torch.randn(TOKENS, HIDDEN), biases(IDLE)).square().mean().backward()
    gradient = model.experts[IDLE].down.weight.grad  # type: ignore[union-attr, index]
    assert gradient is not None and not gradient.any()
