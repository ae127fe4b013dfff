"""Counts as help spreads them: nothing but numbers."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from memfine_fx.expert_parallel.replication import Spread, spread_rows
from memfine_fx.expert_parallel.schedule import Rounds
from tests.expert_parallel.test_replication import Case, cases


def spread_of(case: Case) -> Spread:
    return spread_rows(case.counts, case.placement, case.plan(), case.slots, case.node_ranks)


@given(cases())
@settings(deadline=None, max_examples=100)
def test_every_row_of_a_source_has_one_place(case: Case) -> None:
    spread = spread_of(case)
    for rank, counts in enumerate(case.counts):
        expert_begins = counts.cumsum(0) - counts
        begins = spread.begins(expert_begins, rank)
        rows = [
            (row, int(spread.experts[place]))
            for place, (begin, count) in enumerate(zip(begins.tolist(), spread.counts[rank].tolist(), strict=True))
            for row in range(begin, begin + count)
        ]
        expected = torch.repeat_interleave(torch.arange(case.placement.num_experts), counts).tolist()
        assert sorted(rows) == list(enumerate(expected))


@given(cases())
@settings(deadline=None, max_examples=100)
def test_ranks_compute_what_the_plan_says_with_the_experts_that_they_have(case: Case) -> None:
    spread, plan = spread_of(case), case.plan()
    assert tuple(spread.placement.by_rank(spread.counts.sum(dim=0)).tolist()) == plan.computed
    for rank in range(case.placement.num_ranks):
        clones = [expert for expert in spread.clones_on(rank) if expert >= 0]
        assert clones == [clone.expert for clone in plan.clones if clone.rank == rank] or sorted(clones) == sorted(
            clone.expert for clone in plan.clones if clone.rank == rank
        )
        owned = spread.placement.owned(rank)
        own = spread.experts[owned.start : owned.start + spread.num_own].tolist()
        assert [expert for expert in own if expert >= 0] == list(case.placement.owned(rank))


@given(cases())
@settings(deadline=None, max_examples=50)
def test_the_schedule_of_places_has_rounds_for_the_mean_and_no_more(case: Case) -> None:
    spread = spread_of(case)
    busiest, rows = case.plan().busiest, max(1, case.target)
    assert Rounds(spread.counts, spread.placement, rows, 4 * rows).num_rounds == -(-busiest // rows)
