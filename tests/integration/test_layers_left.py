"""Layers that no compiled graph reads are counted as not chunked, by their path; a limit of Dynamo's leaves none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memfine_fx
from memfine_fx.compat import checks
from memfine_fx.compat.settings import RECOMPILE_LIMIT
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE
from memfine_fx.models.naive import NaiveConfig, NaiveMoE
from memfine_fx.report.reports import first_step_line
from tests.integration.comparison import FP32_TOLERANCE, relative_error

LAYERS, HIDDEN = 11, 8
"""More layers than Dynamo's limit of eight compilations of one code."""


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # what a guard of Dynamo's asks, as a layer's place in a cache of keys
        self.mlp = MixtralMoE(MixtralConfig(HIDDEN, 6, num_experts=4, top_k=2, spelling="gathered"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + 0.02 * (1 + self.number) * self.mlp(hidden)
        return result


class Listed(nn.Module):
    """A layer whose experts are a list, and a list of other modules that nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = NaiveMoE(NaiveConfig(HIDDEN, 6, num_experts=4, top_k=2))
        self.unused = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.mlp(hidden)
        return result


class Stack(nn.Module):
    """Layers with a graph break behind each, as a model with images has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(number) for number in range(LAYERS))

    def forward(self, hidden: torch.Tensor, num_layers: int = LAYERS) -> torch.Tensor:
        for layer in self.layers[:num_layers]:
            hidden = layer(hidden)
            torch._dynamo.graph_break()
        return hidden


def trained(num_layers: int = LAYERS) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """An optimized model and one that was not, after a backward each."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Stack()
    reference = copy.deepcopy(model)
    memfine_fx.optimize(model, inner_backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hidden = torch.randn(13, HIDDEN)
    for each in (model, reference):
        each(hidden, num_layers).square().mean().backward()
    return model, reference, optimizer


def test_each_of_many_layers_in_frames_of_their_own_is_chunked() -> None:
    model, reference, _ = trained()
    report = memfine_fx.report(model)
    paths = [region.where.module for region in report.regions]
    assert (report.num_chunked, len(set(paths))) == (LAYERS, LAYERS)
    assert all(path.startswith(f"layers.{number}.mlp") for number, path in enumerate(paths))
    assert first_step_line(report).startswith(f"{LAYERS} of {LAYERS} MoE layers chunked")
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) < FP32_TOLERANCE


def test_layers_that_dynamo_gave_up_on_are_counted_and_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks._failures, RECOMPILE_LIMIT.name, "broken on purpose")
    with pytest.warns(UserWarning, match="differs from what memfine_fx knows"):
        model, _, optimizer = trained()
    report = memfine_fx.report(model)
    left = [region for region in report.regions if region.status == "refused"]
    assert 0 < len(left) < LAYERS and report.num_chunked == LAYERS - len(left)
    assert {region.refused_for for region in left} == {"NOT_CAPTURED"}
    assert [region.where.module.split(".")[1] for region in left] == [
        str(number) for number in range(report.num_chunked, LAYERS)
    ]
    with pytest.warns(UserWarning, match=f"{report.num_chunked} of {LAYERS} MoE layers chunked.*layers.10.mlp"):
        optimizer.step()


def test_a_list_of_modules_that_nothing_runs_is_no_layer() -> None:
    torch.compiler.reset()
    model = Listed()
    memfine_fx.optimize(model, inner_backend="aot_eager")
    model(torch.randn(13, HIDDEN)).sum().backward()
    assert [region.status for region in memfine_fx.report(model).regions] == ["chunked"]


def test_layers_that_have_not_run_are_counted_until_they_do() -> None:
    model, _, _ = trained(num_layers=3)
    assert first_step_line(memfine_fx.report(model)).startswith(f"3 of {LAYERS} MoE layers chunked")
    model(torch.randn(13, HIDDEN)).sum().backward()
    assert first_step_line(memfine_fx.report(model)).startswith(f"{LAYERS} of {LAYERS} MoE layers chunked")
