"""How even are rows on 32 to 1,024 ranks with help for hot experts, and what does it cost? On paper.

Counts come from shares of rows per expert, sampled anew for each source. The plan of help is the one of
`memfine_fx.expert_parallel.replication`, chosen by its cost model; beside it stand

    no help     every row to its expert's owner
    one shot    each expert of a rank 5% above the mean, fullest first, is cloned once, on the rank that has fewest rows
                and a free slot, and its rows are split evenly between the two: cloning in the spirit of ECHO, whose
                code was not run
    capacity    no expert computes more than 1.25 of the mean of all experts; the other rows are dropped

Seconds are those of the cost model, of one layer's forward and backward: the busiest rank's products at an assumed rate
and the fullest link at assumed bandwidths. Nothing is sent. Experts stand on ranks in a random order.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.measures import Answer
from benchmarks.measures.ep_scale import Model, shares
from benchmarks.summaries import markdown
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.replication import Clone, ReplicationPlan, no_replication
from memfine_fx.expert_parallel.replication_costs import TARGETS, ReplicationCosts, choose_replication
from memfine_fx.report.chart import Axis, Chart, Line, Mark, write_charts

__all__ = ["POLICIES", "Outcome", "costs_of", "counts_of", "draw", "measure", "outcome", "within_capacity"]

RANKS = (32, 64, 128, 256, 512, 1024)
LOADS = ("balanced", "zipf:1", "paper:4", "paper:8", "paper:15", "one")
SLOTS = 2
CAPACITY = 1.25
_FLOPS = 4e14
_NEAR_GB_PER_S, _NODE_RANKS = 400.0, 8
_STEP_FLOPS = 3  # forward, and backward with twice its products
_MIB = 2**20
_HEADER = "load | ranks | policy | busiest over mean | dropped | clones | slots used | sent MiB | time ms | of no help"


@dataclass(frozen=True)
class Outcome:
    """One policy under one load and group size.

    Args:
        ratio: rows of the busiest rank over the mean.
        dropped: part of all rows that nobody computes.
        clones, slots: in all, and the most on one rank.
        sent_bytes: of clones' weights and gradients, by the rank that sends most of them.
        seconds: by the cost model.
        planning_seconds: of making the plan.
    """

    load: str
    ranks: int
    policy: str
    ratio: float
    dropped: float
    clones: int
    slots: int
    sent_bytes: int
    seconds: float
    planning_seconds: float


def measure(figure: Path | None = None, largest: int = RANKS[-1]) -> Answer:
    ranks = [one for one in RANKS if one <= largest]
    found = [outcome(load, one, policy) for load in LOADS for one in ranks for policy in POLICIES]
    if figure is not None:
        draw(found, figure)
    slowest = max(one.planning_seconds for one in found if one.policy == "help")
    planned = f"Making the plan took at most {1e3 * slowest:.0f} ms ({ranks[-1]} ranks; one thread here)."
    return Answer([markdown(_HEADER, [_cells(one, found) for one in found]), "", planned])


def costs_of(model: Model) -> ReplicationCosts:
    """Rates assumed of one accelerator and its links: 400 TFLOP/s, 400 GB/s in nodes of 8 ranks, else one link."""
    row, expert = model.hidden * model.item_bytes, 3 * model.hidden * model.width
    return ReplicationCosts(
        row_seconds=_STEP_FLOPS * 2 * expert / _FLOPS,
        there_bytes=3 * row,  # rows in forward, rows and their results' gradients in backward
        back_bytes=2 * row,
        weight_bytes=expert * model.item_bytes,
        gradient_bytes=expert * 4,
        near=_NEAR_GB_PER_S * 1e9,
        far=model.gb_per_s * 1e9,
        latency=model.latency_us * 1e-6,
        node_ranks=_NODE_RANKS,
    )


def counts_of(load: str, num_ranks: int, model: Model) -> torch.Tensor:
    """[ep,E], sampled: as many experts as DeepSeek-V3 has, or one a rank where there are more ranks."""
    generator = torch.Generator().manual_seed(num_ranks)
    num_experts = max(256, num_ranks)
    mean = shares(load, num_experts)[torch.randperm(num_experts, generator=generator)] * model.tokens * model.top_k
    sampled = torch.poisson(mean.expand(num_ranks, num_experts), generator=generator)
    return sampled.clamp(max=model.tokens).to(torch.int64)


def _one_shot(counts: torch.Tensor, placement: Placement, costs: ReplicationCosts) -> ReplicationPlan:
    computed = list(no_replication(counts, placement).computed)
    rows: list[int] = counts.sum(dim=0).tolist()
    mean, used = sum(rows) / placement.num_ranks, [0] * placement.num_ranks
    clones = []
    for expert in sorted(range(placement.num_experts), key=lambda one: -rows[one]):
        owner, moved = placement.owner(expert), rows[expert] // 2
        free = [rank for rank in range(placement.num_ranks) if used[rank] < SLOTS and rank != owner]
        if computed[owner] <= TARGETS[0] * mean or not moved or not free:
            continue
        helper = min(free, key=computed.__getitem__)
        clones.append(Clone(expert, helper, moved))
        used[helper] += 1
        computed[owner] -= moved
        computed[helper] += moved
    return ReplicationPlan(tuple(clones), tuple(computed))


def _own(counts: torch.Tensor, placement: Placement, costs: ReplicationCosts) -> ReplicationPlan:
    return choose_replication(counts, placement, costs, SLOTS)


def _none(counts: torch.Tensor, placement: Placement, costs: ReplicationCosts) -> ReplicationPlan:
    return no_replication(counts, placement)


POLICIES: dict[str, Callable[[torch.Tensor, Placement, ReplicationCosts], ReplicationPlan]] = {
    "no help": _none,
    "one shot": _one_shot,
    "help": _own,
    "capacity": _none,
}


def outcome(load: str, num_ranks: int, policy: str, model: Model | None = None) -> Outcome:
    """One policy under one load."""
    model = model or Model()
    costs, counts = costs_of(model), counts_of(load, num_ranks, model)
    placement, total = Placement(counts.shape[1], num_ranks), int(counts.sum())
    if policy == "capacity":
        counts = within_capacity(counts)
    started = time.perf_counter()
    plan = POLICIES[policy](counts, placement, costs)
    planning_seconds = time.perf_counter() - started
    return Outcome(
        load,
        num_ranks,
        policy,
        plan.busiest * num_ranks / total,
        1 - int(counts.sum()) / total,
        len(plan.clones),
        plan.slots_used(),
        costs.clones_wire(placement, plan).most_sent,
        costs.seconds(counts, placement, plan),
        planning_seconds,
    )


def within_capacity(counts: torch.Tensor) -> torch.Tensor:
    """What is left where each expert takes 1.25 of the mean of all experts, of every source the same part."""
    rows = counts.sum(dim=0)
    part = (CAPACITY * rows.sum() / rows.numel() / rows.clamp(min=1)).clamp(max=1)
    return (counts * part).to(torch.int64)


def _cells(one: Outcome, found: list[Outcome]) -> list[str]:
    alone = next(o for o in found if (o.load, o.ranks, o.policy) == (one.load, one.ranks, "no help"))
    return [
        one.load,
        str(one.ranks),
        one.policy,
        f"{one.ratio:.2f}",
        f"{one.dropped:.1%}" if one.policy == "capacity" else "",
        str(one.clones) if one.clones else "",
        str(one.slots) if one.clones else "",
        f"{one.sent_bytes / _MIB:,.0f}" if one.clones else "",
        f"{1e3 * one.seconds:,.0f}",
        f"{one.seconds / alone.seconds:.2f}",
    ]


def draw(found: list[Outcome], file: Path) -> None:
    ratios, seconds = list[Mark](), list[Mark]()
    for load, is_dashed in (("paper:15", False), ("zipf:1", True)):
        for policy, colour in zip(POLICIES, ("series7", "series4", "series0", "series10"), strict=True):
            own = [outcome for outcome in found if (outcome.load, outcome.policy) == (load, policy)]
            for marks, values in ((ratios, [one.ratio for one in own]), (seconds, [1e3 * one.seconds for one in own])):
                points = [(outcome.ranks, value) for outcome, value in zip(own, values, strict=True)]
                marks.append(Line(points, f"{policy}, {load}", colour, has_dots=True, is_dashed=is_dashed))
    ranks = sorted({outcome.ranks for outcome in found})
    x = Axis("ranks", is_log=True, ticks=[(number, str(number)) for number in ranks])
    left = Chart(x, Axis("rows of the busiest rank over the mean", is_log=True), ratios)
    right = Chart(x, Axis("ms of a layer by the cost model", is_log=True), seconds)
    write_charts(file, [[("Balance", left), ("Time", right)]])
