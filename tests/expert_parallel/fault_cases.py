"""What ranks are told when another one dies or hangs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import memfine_fx
from memfine_fx.errors import ExchangeFailed
from memfine_fx.expert_parallel import sharded
from memfine_fx.expert_parallel.exchange import Exchange
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.models._experts import GatedExperts

EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS, ROWS = 4, 8, 12, 2, 16, 4


@dataclass(frozen=True)
class Leaving:
    """Where the last rank leaves: at such a call of `Exchange`, in its step `number`th.

    Args:
        call: name of the method.
        number: of its calls, from 1.
        slots: for clones of experts; with some, the last rank has clones.
    """

    call: str
    number: int
    slots: int = 0


PLACES = {
    "in the second round": Leaving("swap", 3),  # rows and weights travel in one swap a round, results in another
    "with clones to come": Leaving("pass_on", 1, slots=2),
    "with gradients of clones to return": Leaving("pass_on", 3, slots=2),  # clones come again in backward
}


@dataclass(frozen=True)
class Told:
    """An error's text, and the seconds until it came."""

    message: str
    seconds: float


def layer(rows: int = ROWS, experts: int = EXPERTS, slots: int = 0) -> torch.nn.Module:
    torch.manual_seed(0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    group = expert_group(mesh, rows_per_round=rows, slots=slots)
    config = memfine_fx.Config(inner_backend="eager", rows_per_chunk=rows)
    whole = GatedExperts(experts, HIDDEN, WIDTH, "gathered")
    return memfine_fx.optimize(whole, inner_backend="eager", expert_parallel=group, config=config)


def run_layer(model: torch.nn.Module, first_expert: int = 0) -> torch.Tensor:
    index = (first_expert + torch.arange(TOP_K)).expand(TOKENS, TOP_K).contiguous()
    weight = torch.ones(TOKENS, TOP_K)
    for one in (index, weight):
        torch._dynamo.mark_static(one, 1)
    out: torch.Tensor = model(torch.randn(TOKENS, HIDDEN), index, weight)
    return out


def leaving(rank: int, how: str, where: str) -> Told:
    """The last rank dies or hangs somewhere in a layer; what the others are told."""
    place = PLACES[where]
    sharded.flops_of = lambda ranks: 1.0  # type: ignore[attr-defined]  # so slow that help always pays
    model = layer(slots=place.slots)
    run_layer(model).sum().backward()
    if rank == dist.get_world_size() - 1:
        _leave_at(place, how)
    started = time.monotonic()
    with pytest.raises(ExchangeFailed) as error:
        run_layer(model).sum().backward()
    return Told(str(error.value), time.monotonic() - started)


def _leave_at(place: Leaving, how: str) -> None:
    original = getattr(Exchange, place.call)
    calls = 0

    def leave(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == place.number and how == "dies":
            os._exit(1)
        if calls == place.number:
            time.sleep(1000)
        return original(*args)

    setattr(Exchange, place.call, leave)
