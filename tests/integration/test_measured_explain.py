"""`explain(measure=True)` runs a real backward, and whatever that reaches is as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfine_fx
from benchmarks.campaign.untouched import untouched
from memfine_fx.models import MixtralConfig, MixtralMoE

HIDDEN = 16
CONFIG = memfine_fx.Config(rows_per_chunk=8, inner_backend="eager")


def layer() -> MixtralMoE:
    return MixtralMoE(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered"))


def test_gradients_are_the_same_tensors_with_the_same_bits() -> None:
    model, hidden = layer(), torch.randn(9, HIDDEN)
    model(hidden).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad[0] = float("nan")
    frozen = next(model.parameters()).requires_grad_(False)  # with a gradient of before
    gradient = frozen.grad
    with untouched(model):
        assert memfine_fx.explain(model, hidden, measure=True, config=CONFIG).measured_bytes
    assert frozen.grad is gradient


def test_an_optimizer_that_steps_in_backward_does_not_step() -> None:
    model, hidden = layer(), torch.randn(9, HIDDEN)
    steps = []
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            steps.append(optimizer.step())

        parameter.register_post_accumulate_grad_hook(step)
    with untouched(model):
        memfine_fx.explain(model, hidden, measure=True, config=CONFIG)
    assert not steps
    model(hidden).sum().backward()
    assert len(steps) == len(list(model.parameters()))


def test_backward_stops_at_the_inputs() -> None:
    """What computed them keeps its graph, and gets no gradient."""
    model, before = layer(), nn.Linear(4, HIDDEN)
    hidden = before(torch.randn(9, 4)).sigmoid()
    memfine_fx.explain(model, hidden, measure=True, config=CONFIG)
    assert before.weight.grad is None and hidden.grad_fn is not None
    hidden.sum().backward()
    assert before.weight.grad is not None


def test_backward_leaves_tensors_alone_that_are_no_parameters() -> None:
    class Holds(MixtralMoE):
        def __init__(self) -> None:
            super().__init__(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered"))
            self.held = [torch.ones(HIDDEN, requires_grad=True)]

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * self.held[0]

    model = Holds()
    memfine_fx.explain(model, torch.randn(9, HIDDEN), measure=True, config=CONFIG)
    assert model.held[0].grad is None


def test_a_model_without_trained_parameters_is_measured_through_its_inputs() -> None:
    model, hidden = layer().requires_grad_(False), torch.randn(9, HIDDEN, requires_grad=True)
    with untouched(model, [hidden]):
        assert memfine_fx.explain(model, hidden, measure=True, config=CONFIG).measured_bytes
    with untouched(model, [hidden]):
        assert memfine_fx.explain(model, hidden.detach(), measure=True, config=CONFIG).measured_bytes


def test_inputs_that_are_written_to_are_put_back() -> None:
    class Writes(MixtralMoE):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden.mul_(2)
            return super().forward(hidden)

    model, hidden = Writes(MixtralConfig(HIDDEN, 24, 4, 2, spelling="gathered")), torch.randn(9, HIDDEN)
    with untouched(model, [hidden]):
        memfine_fx.explain(model, hidden, config=CONFIG)
        memfine_fx.verify(model, hidden, config=CONFIG)
        memfine_fx.explain(model, hidden, measure=True, config=CONFIG)


def test_a_buffer_that_a_pending_backward_saved_stays_valid() -> None:
    model, hidden = layer(), torch.randn(9, HIDDEN)
    model.register_buffer("scale", torch.rand(HIDDEN))
    loss = (hidden.requires_grad_() * model.scale).square().sum()
    memfine_fx.explain(model, hidden, measure=True, config=CONFIG)
    loss.backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_under_modes_without_gradients_the_forward_is_measured(mode: type) -> None:
    model, hidden = layer(), torch.randn(9, HIDDEN)
    with untouched(model, [hidden]), mode():
        assert memfine_fx.explain(model, hidden, measure=True, config=CONFIG).measured_bytes
