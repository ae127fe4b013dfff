"""The plan of help on any counts: nothing but numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measures.ep_help import counts_of
from benchmarks.measures.ep_scale import Model
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.replication import (
    ReplicationPlan,
    no_replication,
    plan_replication,
    refit_replication,
    split_rows,
)


@dataclass(frozen=True)
class Case:
    counts: torch.Tensor
    placement: Placement
    slots: int
    slack: int
    node_ranks: int

    @property
    def target(self) -> int:
        """Rows: the mean, and some more."""
        return -(-int(self.counts.sum()) // self.placement.num_ranks) + self.slack

    def plan(self, slots: int | None = None) -> ReplicationPlan:
        return plan_replication(
            self.counts,
            self.placement,
            slots=self.slots if slots is None else slots,
            target=self.target,
            node_ranks=self.node_ranks,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks, num_experts = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    row = st.lists(st.integers(0, 12), min_size=num_experts, max_size=num_experts)
    counts = torch.tensor(draw(st.lists(row, min_size=num_ranks, max_size=num_ranks)))
    kind = draw(st.sampled_from(("any", "one expert", "one source", "nothing")))
    if kind == "one expert":
        counts[:, 1:] = 0
    elif kind == "one source":
        counts[1:] = 0
    elif kind == "nothing":
        counts.zero_()
    placement = Placement(num_experts, num_ranks)
    return Case(counts, placement, draw(st.integers(0, 3)), draw(st.integers(0, 5)), draw(st.integers(1, num_ranks)))


def computed_by(case: Case, plan: ReplicationPlan) -> torch.Tensor:
    """[ep], from the split of every expert's rows."""
    rows = torch.zeros(case.placement.num_ranks, dtype=torch.int64)
    clones = plan.by_expert()
    for expert in range(case.placement.num_experts):
        owner, own = case.placement.owner(expert), clones.get(expert, [])
        split = split_rows(case.counts[:, expert], own, owner, case.node_ranks)
        rows.index_add_(0, torch.tensor([owner, *(one.rank for one in own)]), split.sum(dim=1))
    return rows


@given(cases())
@settings(deadline=None, max_examples=100)
def test_every_row_is_computed_once_where_the_plan_says(case: Case) -> None:
    plan = case.plan()
    for expert, clones in plan.by_expert().items():
        split = split_rows(case.counts[:, expert], clones, case.placement.owner(expert), case.node_ranks)
        assert int(split.min()) >= 0 and torch.equal(split.sum(dim=0), case.counts[:, expert])
        assert split[1:].sum(dim=1).tolist() == [clone.rows for clone in clones]
    assert tuple(computed_by(case, plan).tolist()) == plan.computed


@given(cases())
@settings(deadline=None, max_examples=100)
def test_clones_stand_in_free_slots_of_other_ranks_once(case: Case) -> None:
    plan = case.plan()
    assert all(clone.rank != case.placement.owner(clone.expert) and clone.rows > 0 for clone in plan.clones)
    assert len({(clone.expert, clone.rank) for clone in plan.clones}) == len(plan.clones)
    assert plan.slots_used() <= case.slots
    assert len(plan.clones) <= 2 * case.placement.num_ranks + case.placement.num_experts


@given(cases())
@settings(deadline=None, max_examples=100)
def test_help_burdens_nobody_beyond_the_target(case: Case) -> None:
    before, after = no_replication(case.counts, case.placement).computed, case.plan().computed
    for rows_before, rows_after in zip(before, after, strict=True):
        assert rows_after <= max(rows_before, case.target)
        assert rows_after >= min(rows_before, case.target)


@given(cases())
@settings(deadline=None, max_examples=100)
def test_with_a_slot_for_every_expert_no_rank_is_above_the_target(case: Case) -> None:
    assert case.plan(slots=case.placement.num_experts).busiest <= case.target


@given(cases())
@settings(deadline=None, max_examples=50)
def test_one_slot_is_enough_where_one_rank_has_too_much_of_one_expert(case: Case) -> None:
    case.counts[:, 1:] = 0
    assert case.plan(slots=1).busiest <= case.target


@given(cases())
@settings(deadline=None, max_examples=50)
def test_without_slots_or_with_even_rows_nobody_helps(case: Case) -> None:
    assert case.plan(slots=0) == no_replication(case.counts, case.placement)
    even = Case(torch.ones_like(case.counts), Placement(case.counts.shape[1], 1), 2, 0, 1)
    assert not plan_replication(even.counts[:1], even.placement, slots=2, target=even.target).clones


def test_help_comes_from_the_same_node_where_it_can() -> None:
    """Ranks 0 and 2 have too much, 1 and 3 room: each helps its neighbour."""
    counts = torch.tensor([[8, 0, 6, 0]] * 2 + [[0, 0, 0, 0]] * 2)
    plan = plan_replication(counts, Placement(4, 4), slots=1, target=8, node_ranks=2)
    assert {(clone.expert, clone.rank, clone.rows) for clone in plan.clones} == {(0, 1, 8), (2, 3, 4)}


def test_rows_that_stand_where_a_clone_is_stay_there() -> None:
    counts = torch.tensor([[5], [5], [2], [0]])
    plan = plan_replication(counts, Placement(1, 4), slots=1, target=3)
    split = split_rows(counts[:, 0], plan.by_expert()[0], 0, 4)
    for clone, rows in zip(plan.clones, split[1:], strict=True):
        assert int(rows[clone.rank]) == min(clone.rows, int(counts[clone.rank, 0]))


@pytest.mark.parametrize("load", ["one expert", "rising"])
def test_two_slots_balance_a_thousand_ranks(load: str) -> None:
    shares = torch.zeros(1024) if load == "one expert" else 1 / torch.arange(1, 1025)
    shares[0] += 1.0
    counts = (4096 * shares / shares.sum()).round().to(torch.int64).expand(1024, 1024)
    mean = int(counts.sum()) / 1024
    plan = plan_replication(counts, Placement(1024, 1024), slots=2, target=int(1.1 * mean), node_ranks=8)
    assert plan.busiest <= 1.1 * mean < no_replication(counts, Placement(1024, 1024)).busiest / 10


@given(cases())
@settings(deadline=None, max_examples=100)
def test_clones_that_stay_take_other_rows_and_burden_nobody(case: Case) -> None:
    """Clones of one step with the rows of another, which are the same in another order of sources and experts."""
    before = [(clone.expert, clone.rank) for clone in case.plan().clones]
    later = Case(case.counts.flip(0, 1), case.placement, case.slots, case.slack, case.node_ranks)
    plan = refit_replication(later.counts, later.placement, before, target=later.target)
    pairs = [(clone.expert, clone.rank) for clone in plan.clones]
    assert all(clone.rows > 0 for clone in plan.clones) and [pair for pair in before if pair in pairs] == pairs
    assert tuple(computed_by(later, plan).tolist()) == plan.computed
    alone = no_replication(later.counts, later.placement).computed
    for rows_before, rows_after in zip(alone, plan.computed, strict=True):
        assert min(rows_before, later.target) <= rows_after <= max(rows_before, later.target)


@given(cases())
@settings(deadline=None, max_examples=50)
def test_clones_that_stay_with_the_same_rows_help_as_much(case: Case) -> None:
    plan = case.plan()
    told = sorted(((clone.expert, clone.rank) for clone in plan.clones), key=lambda pair: pair[1])
    again = refit_replication(case.counts, case.placement, told, target=case.target)
    assert again.busiest <= max(plan.busiest, case.target)


def test_clones_of_64_ranks_stay_when_rows_are_drawn_anew() -> None:
    """MemFine's layer 15, as ranks tell their clones: in the order of ranks, not in that of the plan."""
    first, placement = counts_of("paper:15", 64, Model()), Placement(256, 64)
    mean = int(first.sum()) / 64
    plan = plan_replication(first, placement, slots=2, target=int(1.05 * mean))
    told = sorted(((clone.expert, clone.rank) for clone in plan.clones), key=lambda pair: pair[1])
    drawn = torch.poisson(first.float(), generator=torch.Generator().manual_seed(1)).to(torch.int64)
    again = refit_replication(drawn, placement, told, target=int(1.05 * mean))
    assert plan.busiest <= 1.05 * mean and again.busiest <= 1.1 * mean
