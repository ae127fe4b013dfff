"""What the arguments of `optimize` mean, and a report before the first call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch

import memfine_fx
from memfine_fx.compiler.optimized import optimized_call
from memfine_fx.models import MixtralConfig, MixtralMoE


def layer() -> MixtralMoE:
    return MixtralMoE(MixtralConfig(hidden=16, expert_width=24, spelling="gathered"))


def config_of(model: torch.nn.Module) -> memfine_fx.Config:
    call = optimized_call(model)
    assert call is not None and call.session is not None
    return call.session.config


BASE = memfine_fx.Config(inner_backend="eager", memory_budget="2GiB", verify=True, rows_per_chunk=7)


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"inner_backend": "inductor"}, {"inner_backend": "inductor"}),
        ({"inner_backend": "aot_eager"}, {"inner_backend": "aot_eager"}),
        ({"memory_budget": 10**9}, {"memory_budget": 10**9}),
        ({"verify": False}, {"verify": False}),
        ({"inner_backend": None, "memory_budget": None, "verify": None}, {}),
    ],
)
def test_what_is_given_overrides_the_config_and_what_is_not_leaves_it(
    given: dict[str, object], changed: dict[str, object]
) -> None:
    model = memfine_fx.optimize(layer(), config=BASE, **given)  # type: ignore[arg-type]
    assert config_of(model) == dataclasses.replace(BASE, **changed)  # type: ignore[arg-type]


def test_without_a_config_the_defaults_hold() -> None:
    assert config_of(memfine_fx.optimize(layer())) == memfine_fx.Config()


@pytest.mark.parametrize("given", [{"inner_backend": "cudnn"}, {"verify": 1}, {"memory_budget": 0}])
def test_a_malformed_argument_is_named(given: dict[str, object]) -> None:
    with pytest.raises(memfine_fx.ConfigError, match=next(iter(given))):
        memfine_fx.optimize(layer(), config=BASE, **given)  # type: ignore[arg-type]


def test_the_world_before_it_is_initialized_is_an_error_that_leaves_the_model_alone() -> None:
    model = layer()
    with pytest.raises(memfine_fx.ConfigError, match="init_process_group first, or pass False"):
        memfine_fx.optimize(model, expert_parallel=torch.distributed.group.WORLD)
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("given", [{}, {"expert_parallel": False}])
def test_without_ranks_nothing_is_asked_of_torch_distributed(given: dict[str, bool]) -> None:
    model = memfine_fx.optimize(layer(), config=BASE, **given)  # type: ignore[arg-type]
    assert optimized_call(model) is not None


def test_a_report_before_the_first_call_says_that_nothing_has_run() -> None:
    model = memfine_fx.optimize(layer(), inner_backend="eager")
    before = memfine_fx.report(model)
    assert not before.has_run and json.loads(before.to_json())["has_run"] is False
    assert str(before) == "memfine_fx: nothing has run yet; regions are found at the first call of the model"
    model(torch.randn(5, 16))
    after = memfine_fx.report(model)
    assert after.has_run and "1 of 1 regions chunked" in str(after)


@pytest.mark.filterwarnings("ignore:memfine_fx found nothing to chunk")
def test_a_model_that_has_run_without_experts_says_so() -> None:
    model = memfine_fx.optimize(torch.nn.Linear(4, 4), inner_backend="eager")
    model(torch.randn(3, 4))
    assert "no routing decision" in str(memfine_fx.report(model))


@pytest.mark.parametrize("function", [memfine_fx.explain, memfine_fx.verify])
def test_an_option_among_the_inputs_is_not_swallowed(function: Callable[..., object]) -> None:
    class Anything(torch.nn.Module):
        def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return x

    with pytest.raises(memfine_fx.ConfigError, match=r"config=Config\(memory_budget='1GiB'\)"):
        function(Anything(), torch.ones(2), memory_budget="1GiB")
