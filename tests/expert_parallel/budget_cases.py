"""One layer under a budget of bytes on each rank, under even and worst routing."""

from __future__ import annotations

import torch
import torch.distributed as dist

import memfine_fx
from benchmarks.expert_parallel import letting_go
from benchmarks.loads import choose_experts, expert_counts
from memfine_fx.memory.measure import trace_memory
from memfine_fx.models._experts import GatedExperts

BUDGET_BYTES = 40 * 2**20
TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 256, 512, 16, 4


def bytes_of_steps(rank: int) -> dict[str, int]:
    """By load: everything alive at the peak of a step, parameters, gradients and inputs included."""
    torch.manual_seed(0)
    model = GatedExperts(EXPERTS, HIDDEN, WIDTH, "gathered")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    memfine_fx.optimize(model, expert_parallel=mesh, memory_budget=BUDGET_BYTES)
    generator = torch.Generator().manual_seed(rank)
    return {load: _bytes_of_step(model, load, generator) for load in ("balanced", "one")}


def _bytes_of_step(model: torch.nn.Module, load: str, generator: torch.Generator) -> int:
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
    return trace.peak_bytes + sum(one.numel() * one.element_size() for one in [*leaves, index])
