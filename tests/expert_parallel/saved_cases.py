"""What a layer that keeps what comes from other ranks computes, and how many bytes it sends."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import memfine_fx
from memfine_fx.expert_parallel.exchange import Exchange
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.models._experts import GatedExperts
from tests.expert_parallel.layer_cases import HIDDEN, WIDTH, LayerCase, Outcome, run_case

__all__ = ["BUDGETS", "Sent", "run_saved"]

EXPERTS, TOP_K, TOKENS, ROWS = 5, 2, 24, 7
BUDGETS = ("1GiB", "30kB", "27kB")


@dataclass(frozen=True)
class Sent:
    """What came out of a step, and the bytes that this rank sent in it."""

    outcome: Outcome
    num_bytes: int


def run_saved(rank: int, num_ranks: int) -> dict[tuple[str, str], Sent]:
    """By budget and routing."""
    found = {}
    for budget in BUDGETS:
        whole, sharded = _models(num_ranks, budget)
        for route in ("random", "first", "last"):
            case = LayerCase(route, (TOKENS,) * num_ranks, EXPERTS, TOP_K, ROWS, route=route)
            run_case(case, rank, whole, sharded)  # plans are made again once the graph is compiled
            with _counted() as sent:
                outcome = run_case(case, rank, whole, sharded)
            found[budget, route] = Sent(outcome, sum(sent))
    return found


def _models(num_ranks: int, budget: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (num_ranks,))
    whole = GatedExperts(EXPERTS, HIDDEN, WIDTH, "gathered")
    config = memfine_fx.Config(memory_budget=budget, rows_per_chunk=ROWS)
    sharded = memfine_fx.optimize(
        copy.deepcopy(whole),
        inner_backend="aot_eager",
        config=config,
        expert_parallel=expert_group(mesh, rows_per_round=ROWS),
    )
    return whole, sharded


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Bytes that this rank sends in each exchange of rows."""
    swap, sent = Exchange.swap, []

    def noting(self: Exchange, inbox: torch.Tensor, outbox: torch.Tensor, *splits: Any) -> Any:
        sent.append(outbox.numel() * outbox.element_size())
        return swap(self, inbox, outbox, *splits)

    Exchange.swap = noting  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        Exchange.swap = swap  # type: ignore[method-assign]
