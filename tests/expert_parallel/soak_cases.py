"""Many steps of training whose routing, tokens and pace change all the time, beside one process with all tokens.

In float64, so that two trainings that compute the same stay together over hundreds of steps.
"""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import memfine_fx
from memfine_fx.expert_parallel import sharded
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.expert_parallel.shard import sharded_parameters
from memfine_fx.models._experts import GatedExperts
from tests.expert_parallel.replication_cases import forget_clones

__all__ = ["ROUTES", "Soak", "soak"]

HIDDEN, WIDTH, EXPERTS, TOP_K, MOST_TOKENS = 6, 8, 6, 2, 20
RATE, LOSS_SCALE, MOST_DELAY_S = 0.05, 0.02, 0.003

Share = Callable[[random.Random], list[float]]
"""Of every expert, how much it is chosen."""


def _zipf(chance: random.Random) -> list[float]:
    shares = [1 / place for place in range(1, EXPERTS + 1)]
    chance.shuffle(shares)
    return shares


def _even(chance: random.Random) -> list[float]:
    return [1.0] * EXPERTS


def _two(chance: random.Random) -> list[float]:
    """Two neighbours take every row, mostly of one rank."""
    first = chance.randrange(EXPERTS - 1)
    return [float(expert in (first, first + 1)) for expert in range(EXPERTS)]


ROUTES: dict[str, Share] = {"zipf": _zipf, "even": _even, "two experts": _two}
_TOKENS = ("any", "none on one rank", "on one rank", "one", "none")


@dataclass(frozen=True)
class Soak:
    """What one rank saw.

    Args:
        loss: largest relative difference from the loss of one process, over all steps.
        parameters: largest relative difference of a parameter after the last step.
        first_loss, last_loss: of one process.
        routes: steps of each kind of routing, and of each number of tokens.
        clones: in every fifth step, on all ranks.
        most_rounds: of those steps.
    """

    loss: float
    parameters: float
    first_loss: float
    last_loss: float
    routes: dict[str, int]
    clones: int
    most_rounds: int


class Block(nn.Module):
    """Experts in a residual, weighted by a gate; which are chosen is given."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = GatedExperts(EXPERTS, HIDDEN, WIDTH, "gathered")

    def forward(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        weight = self.gate(hidden).sigmoid().gather(1, index)
        out: torch.Tensor = self.experts(hidden, index, weight)
        return hidden + out


def soak(rank: int, num_ranks: int, num_steps: int, slots: int) -> Soak:
    """Train for so many steps."""
    warnings.simplefilter("error", RuntimeWarning)
    torch._dynamo.config.recompile_limit = 64  # no tokens, one token, more
    sharded.flops_of = lambda ranks: 1.0  # type: ignore[attr-defined]  # so slow that help always pays
    torch.manual_seed(0)
    reference = Block().double()
    ours = copy.deepcopy(reference)
    mesh = dist.device_mesh.init_device_mesh("cpu", (num_ranks,))
    config = memfine_fx.Config(rows_per_chunk=9, inner_backend="eager")
    group = expert_group(mesh, slots=slots)
    memfine_fx.optimize(ours, inner_backend="eager", dynamic=True, config=config, expert_parallel=group)
    chance, delays = random.Random(3), random.Random(100 + rank)
    worst, losses, routes, clones, most_rounds = 0.0, [], Counter[str](), 0, 0
    for step in range(num_steps):
        torch.manual_seed(step)
        batches = _batches(chance, num_ranks, routes)
        exact = _train(reference, [torch.cat(parts) for parts in zip(*batches, strict=True)], num_ranks)
        if step % 10 == 9 and rank == step // 10 % num_ranks:
            forget_clones(ours)  # alone, as a rank does that compiles again
        loss = _train(ours, batches[rank], 1, delays)
        dist.all_reduce(loss)
        worst = max(worst, abs(float(loss) / num_ranks - exact.item()) / max(exact.item(), 1e-6))
        losses.append(exact.item())
        rounds = None if step % 5 else memfine_fx.report(ours).regions[0].rounds
        if rounds is not None:
            clones, most_rounds = clones + rounds.num_clones, max(most_rounds, rounds.num_rounds)
    pairs = zip(ours.named_parameters(), reference.parameters(), strict=True)
    owned = sharded_parameters(ours)
    parameters = max(
        float(((one - exact).norm() / exact.norm().clamp_min(1e-6)).detach())
        for one, exact in ((one, owned[name].own(other) if name in owned else other) for (name, one), other in pairs)
    )
    return Soak(worst, parameters, losses[0], losses[-1], dict(routes), clones, most_rounds)


def _batches(chance: random.Random, num_ranks: int, routes: Counter[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden and index of every rank, the same on all of them."""
    route, tokens = chance.choice(sorted(ROUTES)), chance.choices(_TOKENS, (6, 2, 2, 1, 1))[0]
    routes[route] += 1
    routes[f"tokens: {tokens}"] += 1
    shares = torch.tensor(ROUTES[route](chance)) + 1e-6  # a token chooses TOP_K different ones
    chosen = chance.randrange(num_ranks)
    counts = [chance.randint(2, MOST_TOKENS) for _ in range(num_ranks)]
    if tokens == "none on one rank":
        counts[chosen] = 0
    elif tokens != "any":
        counts = [0] * num_ranks
        counts[chosen] = {"on one rank": 2 * MOST_TOKENS, "one": 1, "none": 0}[tokens]
    return [(torch.randn(count, HIDDEN, dtype=torch.float64), _index(shares, count)) for count in counts]


def _index(shares: torch.Tensor, tokens: int) -> torch.Tensor:
    if not tokens:
        return torch.empty(0, TOP_K, dtype=torch.int64)
    return torch.multinomial(shares.expand(tokens, -1), TOP_K)


def _train(model: nn.Module, batch: Any, num_ranks: int, delays: random.Random | None = None) -> torch.Tensor:
    """One step; the mean loss of so many ranks, whose tokens these are. With delays the others wait for this rank."""
    hidden, index = batch
    torch._dynamo.mark_static(index, 1)
    _wait(delays)
    loss = (model(hidden, index) - hidden.flip(1)).square().sum() * LOSS_SCALE / num_ranks
    _wait(delays)
    model.zero_grad()
    loss.backward()
    owned = sharded_parameters(model)
    with torch.no_grad():
        for name, one in model.named_parameters():
            assert one.grad is not None, name
            if owned and name not in owned:
                dist.all_reduce(one.grad)
                one.grad /= dist.get_world_size()
            one -= RATE * one.grad
    return loss.detach()


def _wait(delays: random.Random | None) -> None:
    if delays is not None:
        time.sleep(delays.uniform(0, MOST_DELAY_S))
