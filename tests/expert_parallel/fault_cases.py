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
from memfine_fx.expert_parallel.exchange import Exchange
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.models._experts import GatedExperts

EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS, ROWS = 4, 8, 12, 2, 16, 4
LEAVES_AT_SWAP = 3
"""Rows and weights travel in one swap a round, results in another: the third is in the second round."""


@dataclass(frozen=True)
class Told:
    """An error's text, and the seconds until it came."""

    message: str
    seconds: float


def layer(rows: int = ROWS, experts: int = EXPERTS) -> torch.nn.Module:
    torch.manual_seed(0)
    group = expert_group(dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)), rows_per_round=rows)
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


def leaving(rank: int, how: str) -> Told:
    """The last rank dies or hangs in the second round of a layer; what the others are told."""
    model = layer()
    run_layer(model)
    if rank == dist.get_world_size() - 1:
        _leave_at(LEAVES_AT_SWAP, how)
    started = time.monotonic()
    with pytest.raises(ExchangeFailed) as error:
        run_layer(model)
    return Told(str(error.value), time.monotonic() - started)


def _leave_at(number: int, how: str) -> None:
    swap = Exchange.swap
    calls = 0

    def leave(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == number and how == "dies":
            os._exit(1)
        if calls == number:
            time.sleep(1000)
        return swap(*args)  # type: ignore[arg-type]

    Exchange.swap = leave  # type: ignore[method-assign,assignment]
