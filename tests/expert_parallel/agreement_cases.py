"""What ranks are told when one of them does not run a layer as the others do, and what agreement costs."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memfine_fx
from memfine_fx.compiler.optimized import optimized_call
from memfine_fx.errors import BudgetInfeasible, RanksDisagree, Reason
from memfine_fx.expert_parallel.bandwidth import links_of, measure_bandwidth
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.expert_parallel.shard import sharded_parameters
from memfine_fx.models._experts import GatedExperts
from memfine_fx.passes.lower.compiled_expert import compiled_expert_for
from memfine_fx.passes.read.regions import read_regions
from memfine_fx.records import ChunkPlan, Refusal
from tests.expert_parallel.fault_cases import EXPERTS, HIDDEN, ROWS, TOKENS, TOP_K, WIDTH, Told, layer, run_layer

NUM_LAYERS = 2
REASON = "an expert of this test"


class Layer(nn.Module):
    """A router and its experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, num_experts, bias=False)
        self.experts = GatedExperts(num_experts, HIDDEN, WIDTH, "gathered")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, index = self.gate(hidden).softmax(-1).topk(TOP_K)
        out: torch.Tensor = self.experts(hidden, index, weight)
        return hidden + out


class Layers(nn.Module):
    """Several of them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(num_experts) for _ in range(NUM_LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for one in self.layers:
            hidden = one(hidden)
        return hidden


class ListOfExperts(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(num_experts))


@dataclass(frozen=True)
class Agreement:
    """What one rank saw.

    Args:
        refused: told when rank 1 alone refuses a layer.
        again: the same in the next step.
        change: largest difference of a gradient from before where all refuse it, afterwards, and where no plan can be
            made any more once forward has run.
        warnings: where all refuse it.
        collectives: of one step whose layers are all chunked.
        outside: told when rank 1 alone runs the model uncompiled.
        experts: told when ranks gather different experts of a list.
        layers: told when ranks run layers with different numbers of experts.
        ids: what is raised when a routing of rank 1 names an expert that is not there.
        budget: what is raised when the budget of rank 1 alone cannot be met.
        sharding: told by `optimize` when ranks hold another config, another model, and another number of slots.
        slots: of this rank where the ranks' budgets differ.
        node_ranks: ranks of a node where LOCAL_WORLD_SIZE is another on each.
        compiled_expert: told when ranks compute a layer in different ways.
    """

    refused: Told
    again: Told
    change: dict[str, float]
    warnings: list[str]
    collectives: dict[str, int]
    outside: Told
    experts: Told
    layers: Told
    ids: Told
    budget: Told
    sharding: tuple[Told, Told, Told]
    slots: int
    node_ranks: int
    compiled_expert: Told


def agreeing(rank: int) -> Agreement:
    model = _optimized(Layers(EXPERTS))
    before = _gradients(model)
    collectives = _collectives(lambda: _gradients(model))
    with _refusing(rank == 1):
        refused = _told(lambda: _gradients(model))
        again = _told(lambda: _gradients(model))
    with _refusing(True), pytest.warns(RuntimeWarning) as warned:
        whole = _gradients(model)
    with _refusing(False):
        after = _gradients(model)
    late = _gradients(model, before_backward=lambda: _lose_plans(model))
    torch._dynamo.reset()  # regions with plans again
    with torch.compiler.set_stance("force_eager" if rank == 1 else "default"):
        outside = _told(lambda: _gradients(model))
    experts = _optimized(ListOfExperts(EXPERTS)).experts
    large = _optimized(Layer(EXPERTS + 2))
    model_of_compiled = layer()
    without_folding = functools.partial(compiled_expert_for, folds_weight=False) if rank == 1 else compiled_expert_for
    with mock.patch("memfine_fx.compiler.regions.compiled_expert_for", without_folding):
        compiled_expert = _told(lambda: run_layer(model_of_compiled))
    return Agreement(
        refused=refused,
        again=again,
        change={
            "all refuse": _difference(whole, before),
            "afterwards": _difference(after, before),
            "late": _difference(late, before),
        },
        warnings=[str(one.message) for one in warned],
        collectives=collectives,
        outside=outside,
        experts=_told(lambda: experts[rank].weight),
        layers=_told(lambda: (large if rank == 1 else model)(torch.randn(TOKENS, HIDDEN))),
        ids=_told(lambda: _out_of_range(rank), IndexError if rank == 1 else RanksDisagree),
        budget=_told(
            lambda: _gradients(_optimized(Layer(EXPERTS), memory_budget=1000 if rank == 1 else None)),
            BudgetInfeasible if rank == 1 else RanksDisagree,
        ),
        sharding=(
            _told(lambda: layer(rows=ROWS + rank)),
            _told(lambda: layer(experts=EXPERTS + rank)),
            _told(lambda: layer(slots=rank)),
        ),
        slots=_slots_of(_optimized(Layer(EXPERTS), memory_budget="1GiB" if rank else 100_000)),
        node_ranks=_node_ranks(rank),
        compiled_expert=compiled_expert,
    )


def _node_ranks(rank: int) -> int:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(1 + rank)):
        group = expert_group(dist.device_mesh.init_device_mesh("cpu", (2,)))
        assert group.node_ranks == 1 + rank
        measure_bandwidth(group)
    return links_of(group).node_ranks


def _slots_of(model: nn.Module) -> int:
    return next(iter(sharded_parameters(model).values())).ranks.slots


def _optimized(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    config = memfine_fx.Config(inner_backend="eager", rows_per_chunk=None if options else 1000)
    return memfine_fx.optimize(model, inner_backend="eager", expert_parallel=mesh, config=config, **options)


def _gradients(model: nn.Module, before_backward: Callable[[], None] = lambda: None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1 + dist.get_rank())
    out: torch.Tensor = model(torch.randn(TOKENS, HIDDEN))
    before_backward()
    out.square().sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def _lose_plans(model: nn.Module) -> None:
    """As where a backward that is compiled late tells more of the step than a budget can keep."""

    def choose_none(num_tokens: int) -> ChunkPlan:
        raise BudgetInfeasible(1, 2, [])

    call = optimized_call(model)
    assert call is not None and call.session is not None
    for lowered in call.session.lowered:
        lowered.live.forget_plans()
        lowered.live.choose_plan = choose_none


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys() and one
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


@contextlib.contextmanager
def _refusing(does_here: bool) -> Iterator[None]:
    """The last layer is compiled again, and refused where `does_here`; a rank 0 that differs keeps its graph."""

    def refuse(*body: Any) -> Any:
        last = f"layers.{NUM_LAYERS - 1}.experts"
        found = read_regions(*body)
        return [
            Refusal(one.where, Reason.ROWS_NOT_FOLLOWED, REASON) if does_here and one.where.module == last else one
            for one in found
        ]

    if does_here:
        torch._dynamo.reset()
    with mock.patch("memfine_fx.compiler.regions.read_regions", refuse):
        yield
    if does_here:
        torch._dynamo.reset()


def _told(run: Callable[[], object], kind: type[Exception] = RanksDisagree) -> Told:
    started = time.monotonic()
    with pytest.raises(kind) as error:
        run()
    return Told(str(error.value), time.monotonic() - started)


def _collectives(run: Callable[[], object]) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    names = Counter(event.name for event in trace.events())
    return {name: number for name, number in names.items() if name.startswith("c10d::")}


def _out_of_range(rank: int) -> torch.Tensor:
    """Rank 1 names an expert that is not there."""
    return run_layer(_optimized(GatedExperts(EXPERTS, HIDDEN, WIDTH, "gathered")), first_expert=rank * (EXPERTS - 1))
