"""One layer of experts on several ranks against the whole one on all tokens, under adversarial routing.

The loss of a rank is a weighted sum of its outputs; the reference's is the mean over ranks, so experts' gradients must
be equal, and a rank's gradients of its own tokens are those of the reference times the number of ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import memfine_fx
from memfine_fx.config import Axis, InnerBackend
from memfine_fx.expert_parallel import sharded
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.models._experts import GatedExperts
from memfine_fx.runtime.loads import RoundStats

HIDDEN, WIDTH = 8, 12

Route = Callable[[int, int, int], torch.Tensor]
"""(T, E, K) -> index [T,K]."""


@dataclass(frozen=True)
class LayerCase:
    """Tokens by rank, sizes, routing, rows a chunk; with a budget, what comes may be kept for backward.

    A round has as many rows as a chunk, or `round_rows`: None for as many as even routing brings.
    """

    name: str
    tokens: tuple[int, ...]
    num_experts: int = 5
    top_k: int = 2
    rows: int = 7
    round_rows: int | None = 7
    slots: int = 0
    overlaps: bool = False
    dtype: torch.dtype = torch.float32
    route: str = "random"
    budget: str | None = None
    axis: Axis = "rows"


def _random(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]) if tokens else _none(top_k)


def _none(top_k: int) -> torch.Tensor:
    return torch.empty(0, top_k, dtype=torch.int64)


def _first(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """All rows to the first experts, which are on rank 0."""
    return torch.arange(top_k).repeat(tokens, 1)


def _last(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return (experts - 1 - torch.arange(top_k)).repeat(tokens, 1)


def _in_turn(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """The first half of the tokens to the first experts, the others to the last: even in all, and in no part."""
    half = tokens // 2
    return torch.cat([_first(half, experts, top_k), _last(tokens - half, experts, top_k)])


def _even(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Every expert as often as any other."""
    return (torch.arange(tokens).unsqueeze(1) * top_k + torch.arange(top_k)) % experts


ROUTES: dict[str, Route] = {"even": _even, "random": _random, "first": _first, "last": _last, "in turn": _in_turn}


ON_ONE_RANK = ("random routing", "no tokens anywhere", "even routing, kept", "one row a round", "slices of tokens")


def cases(num_ranks: int) -> list[LayerCase]:
    even = (24,) * num_ranks
    of_several = [
        LayerCase("random routing", even),
        LayerCase("all rows to the first rank", even, route="first"),
        LayerCase("all rows to the last rank", even, route="last"),
        LayerCase("tokens on one rank only", (40, *[0] * (num_ranks - 1))),
        LayerCase("no tokens anywhere", (0,) * num_ranks),
        LayerCase("ranks with different numbers of tokens", tuple(5 + 17 * rank for rank in range(num_ranks))),
        LayerCase("even routing", even, num_experts=2 * num_ranks, round_rows=None, route="even"),
        LayerCase("even routing, kept", even, num_experts=2 * num_ranks, round_rows=None, route="even", budget="1GiB"),
        LayerCase("all rows to the last rank, large rounds", even, round_rows=None, route="last"),
        LayerCase("all rows to the last rank, large rounds, kept", even, round_rows=None, route="last", budget="1GiB"),
        LayerCase("tokens on one rank only, large rounds", (40, *[0] * (num_ranks - 1)), round_rows=None),
        LayerCase("rounds of two chunks and a half, overlapping", even, round_rows=17, overlaps=True),
        LayerCase("rounds in all-to-alls", (200,) * num_ranks, rows=64, round_rows=None),
        LayerCase("rounds in all-to-alls, kept", (200,) * num_ranks, rows=64, round_rows=None, budget="1GiB"),
        LayerCase(
            "all-to-alls, one source, overlapping",
            (600, *[3] * (num_ranks - 1)),
            rows=64,
            round_rows=280,
            overlaps=True,
        ),
        LayerCase("help, all rows to the first rank", even, route="first", slots=2),
        LayerCase("help, all rows to the last rank", even, route="last", slots=1),
        LayerCase("help, random routing, overlapping", even, slots=2, overlaps=True),
        LayerCase("help, tokens on one rank only", (40, *[0] * (num_ranks - 1)), route="last", slots=2),
        LayerCase("help, one token", (1, *[0] * (num_ranks - 1)), round_rows=None, slots=2),
        LayerCase("help, more ranks than experts", even, num_experts=1, top_k=1, slots=1),
        LayerCase("help, kept", even, route="last", round_rows=None, slots=2, budget="1GiB"),
        LayerCase("one token", (1, *[0] * (num_ranks - 1)), round_rows=None),
        LayerCase("one row a round", (4,) * num_ranks, rows=1, round_rows=1),
        LayerCase("bfloat16, large rounds", even, dtype=torch.bfloat16, round_rows=None),
        LayerCase("more ranks than experts", even, num_experts=1, top_k=1),
        LayerCase("every expert chosen", even, num_experts=4, top_k=4),
        LayerCase("kept", even, budget="1GiB"),
        LayerCase("kept, all rows to the last rank", even, route="last", budget="1GiB"),
        LayerCase("kept, tokens on one rank only", (40, *[0] * (num_ranks - 1)), budget="1GiB"),
        LayerCase("rows to ranks in turn", even, route="in turn"),
        LayerCase("slices of tokens", even, axis="tokens"),
        LayerCase("slices of tokens, rows to ranks in turn", even, route="in turn", axis="tokens"),
        LayerCase("slices of tokens, tokens on one rank only", (40, *[0] * (num_ranks - 1)), axis="tokens"),
    ]
    return [case for case in of_several if num_ranks > 1 or case.name in ON_ONE_RANK]


@dataclass(frozen=True)
class Outcome:
    """Largest relative error by tensor; rounds; what is kept for backward; where experts were not chunked, why."""

    errors: dict[str, float]
    rounds: RoundStats | None
    policy: str
    refusal: str
    num_chunks: int


def run_cases(rank: int, num_ranks: int) -> dict[str, Outcome]:
    """Every case on this rank."""
    warnings.simplefilter("error", RuntimeWarning)
    torch._dynamo.config.recompile_limit = 64  # the models share their code
    mesh = dist.device_mesh.init_device_mesh("cpu", (num_ranks,))
    models: dict[Any, Any] = {}
    outcomes = {}
    sharded.flops_of = lambda ranks: 1.0  # type: ignore[attr-defined]  # so slow that help always pays
    for case in cases(num_ranks):
        sizes = (case.num_experts, case.dtype, case.rows, case.round_rows, case.top_k, case.slots)
        key = (*sizes, case.overlaps, case.budget, case.axis)
        if key not in models:
            models[key] = _models(case, mesh)
        outcomes[case.name] = run_case(case, rank, *models[key])
    return outcomes


def _models(case: LayerCase, mesh: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(1)
    whole = GatedExperts(case.num_experts, HIDDEN, WIDTH, "gathered").to(case.dtype)
    inner: InnerBackend = "eager" if case.budget is None else "aot_eager"  # what is kept is decided on a joint graph
    sizes = {"rows_per_chunk": case.rows, "bins": (1, 2, 4, 8) if case.axis == "tokens" else None}
    config = memfine_fx.Config(inner_backend=inner, memory_budget=case.budget, axis=case.axis, **sizes)
    sharded = memfine_fx.optimize(
        copy.deepcopy(whole),
        inner_backend=inner,
        dynamic=True,
        config=config,
        expert_parallel=expert_group(mesh, overlaps=case.overlaps, rows_per_round=case.round_rows, slots=case.slots),
    )
    return whole, sharded


def run_case(case: LayerCase, rank: int, whole: torch.nn.Module, sharded: torch.nn.Module) -> Outcome:
    """One step of both."""
    torch.manual_seed(2)
    batches = [_batch(case, tokens) for tokens in case.tokens]
    num_ranks = len(batches)
    reference = copy.deepcopy(whole).double()
    reference.zero_grad()
    everyone = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    expected = _step(reference, *everyone, scale=1 / num_ranks, dtype=torch.float64)
    sharded.zero_grad()
    step = _step(sharded, *batches[rank], scale=1.0, dtype=case.dtype)
    begin = sum(case.tokens[:rank])
    own = slice(begin, begin + case.tokens[rank])
    owned = Placement(case.num_experts, num_ranks).owned(rank)
    errors = {}
    for name, value in step.items():
        if name in ("output", "d hidden", "d weight"):
            exact = expected[name][own] * (1 if name == "output" else num_ranks)
        else:
            exact = expected[name][owned.start : owned.stop]
        errors[name] = _error(value, exact)
    (region,) = memfine_fx.report(sharded).regions
    policy = "" if region.plan is None else region.plan.policy
    refusal = "" if region.status == "chunked" else region.reason
    return Outcome(errors, region.rounds, policy, refusal, region.num_chunks)


def _batch(case: LayerCase, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    index = ROUTES[case.route](tokens, case.num_experts, case.top_k)
    return (
        torch.randn(tokens, HIDDEN).to(case.dtype),
        index,
        torch.rand(tokens, case.top_k).to(case.dtype),
        torch.randn(tokens, HIDDEN),
    )


def _step(
    model: torch.nn.Module,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    probe: torch.Tensor,
    *,
    scale: float,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    torch._dynamo.mark_static(index, 1)  # K is a number in a model's code
    hidden, weight = (one.detach().clone().to(dtype).requires_grad_() for one in (hidden, weight))
    torch._dynamo.mark_static(weight, 1)
    out = model(hidden, index, weight)
    ((out * probe.to(dtype)).sum() * scale).backward()
    assert hidden.grad is not None and weight.grad is not None
    gradients = {f"d {name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"output": out.detach(), "d hidden": hidden.grad, "d weight": weight.grad, **gradients}


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    assert value.shape == exact.shape, f"{list(value.shape)} for {list(exact.shape)}"
    exact = exact.double()
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-6))
