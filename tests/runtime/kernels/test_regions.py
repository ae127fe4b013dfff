"""Regions of a compiled model whose experts the kernels run, against the same model in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import memfine_fx
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE
from memfine_fx.runtime import windowed
from tests.runtime.kernels.cases import DEVICE, in_kernels, relative_error

pytestmark = in_kernels


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched from here on, which take the host's tensors too where there is no device."""
    from memfine_fx.runtime.kernels.launches import Launch

    monkeypatch.setattr(windowed, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setenv("MEMFINE_GPU_KERNELS", "1")
    names: list[str] = []
    run = Launch.run

    def noted(self: Any) -> None:
        names.append(self.name)
        run(self)

    monkeypatch.setattr(Launch, "run", noted)
    return names


def layer() -> MixtralMoE:
    config = MixtralConfig(hidden=32, expert_width=24, num_experts=4, top_k=2, spelling="gathered")
    return MixtralMoE(config).to(DEVICE)


def step(model: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = hidden.clone().requires_grad_()
    out = model(hidden)
    out.square().sum().backward()
    return out, hidden.grad, *(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("rows_per_chunk", (7, 64))
def test_region_runs_in_kernels_and_is_the_eager_layer(rows_per_chunk: int, launches: list[str]) -> None:
    eager = layer()
    config = memfine_fx.Config(rows_per_chunk=rows_per_chunk)
    model = memfine_fx.optimize(copy.deepcopy(eager), config=config, inner_backend="eager")
    hidden = torch.randn(11, 32, device=DEVICE)
    for found, expected in zip(step(model, hidden), step(eager, hidden), strict=True):
        assert relative_error(found, expected) < 1e-5
    num_windows = 4 if rows_per_chunk == 7 else 1
    assert launches.count("weight_gradient_kernel") == 2 * num_windows


def test_frozen_tables_get_no_gradient(launches: list[str]) -> None:
    eager = layer()
    eager.experts.requires_grad_(False)
    model = memfine_fx.optimize(copy.deepcopy(eager), config=memfine_fx.Config(rows_per_chunk=9), inner_backend="eager")
    hidden = torch.randn(6, 32, device=DEVICE)
    found, expected = step(model, hidden), step(eager, hidden)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        assert one is None or relative_error(one, other) < 1e-5
    assert "down_backward_kernel" in launches
    assert "weight_gradient_kernel" not in launches


def test_kernels_are_only_taken_where_they_are_asked_for(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFINE_GPU_KERNELS")
    model = memfine_fx.optimize(layer(), config=memfine_fx.Config(rows_per_chunk=9), inner_backend="eager")
    step(model, torch.randn(6, 32, device=DEVICE))
    assert launches == []


def test_slices_of_tokens_keep_their_bodies(launches: list[str]) -> None:
    config = memfine_fx.Config(axis="tokens", rows_per_chunk=9)
    model = memfine_fx.optimize(layer(), config=config, inner_backend="eager")
    step(model, torch.randn(6, 32, device=DEVICE))
    assert launches == []
