"""One layer with and without a budget of bytes on each rank, under even and worst routing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import memfine_fx
from benchmarks.expert_parallel import letting_go
from benchmarks.loads import choose_experts, expert_counts
from memfine_fx.expert_parallel import sharded
from memfine_fx.expert_parallel.groups import expert_group
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models._experts import GatedExperts

BUDGET_BYTES = 40 * 2**20
TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K, ROWS = 2048, 256, 512, 16, 4, 1024


def bytes_of_steps(rank: int) -> dict[str, int]:
    """By load: everything alive at the peak of a step, parameters, gradients and inputs included."""
    model, generator = _model(memory_budget=BUDGET_BYTES), torch.Generator().manual_seed(rank)
    return {load: sum(_bytes_of_step(model, load, generator)) for load in ("balanced", "one")}


def predicted_and_measured(rank: int, slots: int) -> dict[str, tuple[int, int, int]]:
    """Without a budget, by load: bytes of the layer at its peak as planned and as measured, and rounds.

    Args:
        slots: for clones; where there are some, help always pays.
    """
    if slots:
        sharded.flops_of = lambda ranks: 1.0  # type: ignore[attr-defined]
    model, generator = (
        _model(slots=slots, config=memfine_fx.Config(rows_per_chunk=ROWS)),
        torch.Generator().manual_seed(rank),
    )
    found = {}
    for load in ("balanced", "one"):
        peak, _ = _bytes_of_step(model, load, generator)
        (region,) = memfine_fx.report(model).regions
        assert region.plan is not None and region.rounds is not None
        assert region.plan.rows_per_round == TOKENS * TOP_K * 9 // 8 and region.plan.rows_per_chunk == ROWS
        found[load] = region.plan.predicted_bytes, peak, region.rounds.num_rounds
    return found


def _model(*, slots: int = 0, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = GatedExperts(EXPERTS, HIDDEN, WIDTH, "gathered")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return memfine_fx.optimize(model, expert_parallel=expert_group(mesh, slots=slots), **options)


def _bytes_of_step(model: torch.nn.Module, load: str, generator: torch.Generator) -> tuple[int, int]:
    """At the peak: what the step itself makes, and what is there before it."""
    index = choose_experts(expert_counts(load, TOKENS, EXPERTS, TOP_K), TOKENS, generator)
    hidden = torch.randn(TOKENS, HIDDEN).requires_grad_()
    weight = torch.rand(TOKENS, TOP_K).requires_grad_()
    for one in (index, weight):
        torch._dynamo.mark_static(one, 1)
    probe = torch.randn(TOKENS, HIDDEN)
    leaves = [hidden, weight, *model.parameters()]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        model(hidden, index, weight).backward(probe)

    step()  # compiles
    step()  # plans again, now that the code is read
    for leaf in leaves:
        leaf.grad = None
    with letting_go():
        trace = trace_memory(step, torch.device("cpu"))
    return trace.peak_bytes, sum(one.numel() * one.element_size() for one in [*leaves, index])
