"""Sole gradients: found where a result of a region is all that autograd would add, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memfine_fx
from memfine_fx.compiler.sessions import sessions
from memfine_fx.models.mixtral import MixtralConfig, MixtralMoE

CONFIG = MixtralConfig(hidden=16, expert_width=24, num_experts=4, top_k=2, spelling="gathered")


class Layers(nn.Module):
    """A layer of experts behind what a test does to its tables."""

    def __init__(self, change: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = MixtralMoE(CONFIG)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, x)


def found(change: Callable[..., torch.Tensor], **config: Any) -> set[str]:
    """Names of the parameters whose whole gradient is a result of the region."""
    torch.manual_seed(0)
    model = Layers(change)
    memfine_fx.optimize(model, config=memfine_fx.Config(inner_backend="aot_eager", **config))
    model(torch.randn(2, 8, 16)).sum().backward()
    (record,) = sessions()[-1].graphs
    (region,) = record.live_regions()
    assert region.num_steps == 1
    names = {id(one): name.removeprefix("layer.experts.") for name, one in model.named_parameters()}
    return {names[id(one)] for one in record.parameters_with_sole_gradients(record.step, record.caller).values()}


def test_tables_of_experts_have_sole_gradients() -> None:
    assert found(lambda self, x: self.layer(x)) == {"gate_up_proj", "down_proj"}


def test_a_second_use_makes_a_gradient_a_sum() -> None:
    assert found(lambda self, x: self.layer(x) + self.layer.experts.gate_up_proj.sum()) == {"down_proj"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_on_the_way_is_no_view(dtype: torch.dtype) -> None:
    def cast(self: Any, x: torch.Tensor) -> torch.Tensor:
        tables = {name: table.to(dtype) for name, table in self.layer.named_parameters()}
        result: torch.Tensor = torch.func.functional_call(self.layer, tables, (x.to(dtype),))
        return result

    assert found(cast) == set()


def test_a_gradient_that_goes_elsewhere_is_not_taken_for_the_tables_own() -> None:
    """The values of one table with the gradient of another: straight-through weights."""

    class Instead(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, used: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
            return used.view_as(used)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
            return None, gradient

    def swapped(self: Any, x: torch.Tensor) -> torch.Tensor:
        tables = dict(self.layer.named_parameters())
        tables["experts.down_proj"] = Instead.apply(tables["experts.down_proj"], self.other)  # type: ignore[no-untyped-call]
        result: torch.Tensor = torch.func.functional_call(self.layer, tables, (x,))
        return result

    torch.manual_seed(0)
    model = Layers(swapped)
    model.other = nn.Parameter(torch.randn_like(model.layer.experts.down_proj))  # type: ignore[arg-type, assignment]
    memfine_fx.optimize(model, config=memfine_fx.Config(inner_backend="aot_eager"))
    for _ in range(2):
        model(torch.randn(2, 8, 16)).sum().backward()
    (record,) = sessions()[-1].graphs
    assert not any(
        one is model.other for one in record.parameters_with_sole_gradients(record.step, record.caller).values()
    )
    assert model.layer.experts.down_proj.grad is None
