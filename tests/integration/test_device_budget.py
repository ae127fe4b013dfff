"""Without a budget an accelerator is the budget: the fastest plan that fits it, and never a refusal."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.memory.measure import trace_memory
from tests.devices import give_device
from tests.integration import test_budget
from tests.integration.test_budget import (
    CPU,
    assert_gradients_exact,
    language_model,
    param_bytes,
    step,
    tokens,
)


def trained(memory_budget: Any = None) -> tuple[torch.nn.Module, memfine_fx.Report, int]:
    """(model after a step, report, measured bytes of that step and the model)."""
    model, report, measured = test_budget.trained(memory_budget)
    assert_gradients_exact(model)
    return model, report, param_bytes(model) + measured


def test_what_fits_the_device_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    give_device(1 << 30, monkeypatch.setattr)
    _, report, _ = trained()
    assert report.step is not None
    assert report.step.decision == "nothing costly is recomputed; 2 of 2 regions save their projections"
    assert report.step.budget == "no memory_budget: what the device has for the step bounds it, 1.00 GiB"


@pytest.mark.slow
def test_a_smaller_device_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    give_device(1 << 30, monkeypatch.setattr)
    _, _, most = trained()
    give_device(most * 3 // 4, monkeypatch.setattr)
    _, report, measured = trained()
    assert measured <= most * 3 // 4
    assert report.step is not None and not report.step.decision.startswith("nothing costly is recomputed; 2 of 2")


def test_a_device_that_no_plan_fits_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction is no wish: whether memory ends is seen there."""
    give_device(param_bytes(language_model()), monkeypatch.setattr)
    _, report, _ = trained()
    assert all(
        region.plan is not None and region.plan.reason.startswith("smallest chunk: the step is predicted to take")
        for region in report.regions
    )


@pytest.mark.slow
def test_the_leanest_is_still_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    give_device(1 << 30, monkeypatch.setattr)
    _, report, measured = trained("least")
    _, _, most = trained()
    assert report.step is not None and report.step.budget == 'memory_budget="least": regions save nothing'
    assert measured < most


@pytest.mark.slow
def test_checkpoints_of_the_model_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for the memory that they save."""
    give_device(1 << 30, monkeypatch.setattr)
    measured = {}
    for budget in (None, "least", 1 << 30):
        model = language_model()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        memfine_fx.optimize(model, inner_backend="aot_eager", dynamic=True, memory_budget=budget)
        step(model.train(), tokens())
        model.zero_grad(set_to_none=True)
        measured[budget] = trace_memory(functools.partial(step, model, tokens()), CPU).peak_bytes
    assert measured[None] == measured["least"] < measured[1 << 30]
