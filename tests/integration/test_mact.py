"""Chunks re-decided in every step of an optimized layer: right gradients, the bound kept, nothing compiled again."""

from __future__ import annotations

import copy

import pytest
import torch

import memfine_fx
from memfine_fx.models import MixtralConfig, MixtralMoE
from memfine_fx.passes.lower.compiled_function import num_compilations
from memfine_fx.runtime import mact
from tests.helpers import largest_error

SIZES = MixtralConfig(16, 32, 6, 2, spelling="gathered")


def gradients(layer: torch.nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    leaf = hidden.clone().requires_grad_()
    out = layer(leaf)
    out.square().sum().backward()
    assert leaf.grad is not None
    return [out.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("bins", [None, (1, 2, 4, 8)])
@pytest.mark.parametrize("axis", ["rows", "tokens"])
def test_other_shapes_and_routings_get_other_chunks_and_no_compilation(
    axis: str, bins: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mact, "PATIENCE", 2)
    torch.manual_seed(0)
    layer = MixtralMoE(SIZES)
    reference = copy.deepcopy(layer)
    config = memfine_fx.Config(axis=axis, bins=bins, rows_per_chunk=16, inner_backend="aot_eager")
    memfine_fx.optimize(layer, config=config, dynamic=True)
    counts: list[int] = []
    compiled: list[tuple[int, int]] = []
    for num_tokens, leaning in ((48, 0.0), (47, 9.0), (90, 0.0), (33, 9.0), (20, 0.0), (19, 0.0), (18, 0.0)):
        hidden = torch.randn(num_tokens, 16) + leaning * torch.randn(16)
        for got, wanted in zip(gradients(layer, hidden), gradients(reference, hidden), strict=True):
            assert largest_error(got, wanted) < 1e-5
        report = memfine_fx.report(layer)
        (region,) = report.regions
        assert region.plan is not None and region.num_tokens == num_tokens
        counts.append(region.num_chunks)
        compiled.append((num_compilations(), report.num_graphs))
    assert len(set(counts)) > 2
    assert len(set(compiled[1:])) == 1
