"""State of optimizers: what they hold, and what those that have not stepped will hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memfine_fx.memory.static import foreseen_state_bytes, living_optimizers, static_terms

MAKE: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "AdamW with amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "RMSprop, centered": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


@pytest.mark.parametrize("name", MAKE)
def test_what_is_foreseen_is_what_the_first_step_makes(name: str) -> None:
    params: list[torch.Tensor] = [torch.nn.Parameter(torch.randn(64, 32)), torch.nn.Parameter(torch.randn(128))]
    optimizer = MAKE[name](params)
    assert living_optimizers(params) == [optimizer]
    before = static_terms(params, [optimizer])["optimizer state"]
    foreseen = foreseen_state_bytes(params, [optimizer])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    after = static_terms(params, [optimizer])["optimizer state"]
    assert foreseen == (after - before if name != "Adagrad" else 0)
    assert foreseen_state_bytes(params, [optimizer]) == 0


def test_parameters_of_others_count_nothing() -> None:
    ours, theirs = torch.nn.Parameter(torch.randn(8)), torch.nn.Parameter(torch.randn(8))
    optimizer = torch.optim.Adam([theirs], lr=0.1)
    assert foreseen_state_bytes([ours], [optimizer]) == 0
    assert living_optimizers([ours]) == []


@pytest.mark.trainers
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdEMAMix8bit", "AdamW"])
def test_state_in_eight_bits_is_foreseen(name: str) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    params: list[torch.Tensor] = [torch.nn.Parameter(torch.randn(*shape)) for shape in ((100, 100), (65, 64), (64,))]
    params.append(torch.nn.Parameter(torch.randn(80, 80).bfloat16()))
    optimizer = getattr(optim, name)(params, lr=1e-3)
    foreseen = foreseen_state_bytes(params, [optimizer])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert foreseen == static_terms(params, [optimizer])["optimizer state"]
    assert foreseen_state_bytes(params, [optimizer]) == 0
