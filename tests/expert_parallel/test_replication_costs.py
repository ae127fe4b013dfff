"""Help is taken where it spares time, by the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from memfine_fx.expert_parallel import replication_costs
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.replication import Clone, ReplicationPlan, no_replication
from memfine_fx.expert_parallel.replication_costs import ReplicationCosts, choose_replication, flows_of, tree_of
from tests.expert_parallel.test_replication import Case, cases

COSTS = ReplicationCosts(
    row_seconds=1e-6,
    there_bytes=300,
    back_bytes=200,
    weight_bytes=1000,
    gradient_bytes=2000,
    near=1e9,
    far=1e8,
    latency=1e-9,
    node_ranks=2,
)


@given(cases())
@settings(deadline=None, max_examples=50)
def test_what_is_chosen_takes_no_longer_than_no_help(case: Case) -> None:
    chosen = choose_replication(case.counts, case.placement, COSTS, case.slots)
    without = no_replication(case.counts, case.placement)
    seconds = [COSTS.seconds(case.counts, case.placement, plan) for plan in (chosen, without)]
    assert seconds[0] <= seconds[1] and chosen.slots_used() <= case.slots


@given(cases())
@settings(deadline=None, max_examples=50)
def test_every_rank_chooses_the_same(case: Case) -> None:
    """From its own copy of the gathered counts; a float that is summed in another order would tell."""
    other = case.counts.t().contiguous().t()
    chosen = [choose_replication(counts, case.placement, COSTS, case.slots) for counts in (case.counts, other)]
    assert chosen[0] == chosen[1]


@given(cases())
@settings(deadline=None, max_examples=50)
def test_flows_hold_every_row_of_a_source_once(case: Case) -> None:
    plan = case.plan()
    flows = flows_of(case.counts, case.placement, plan, case.node_ranks)
    assert int(flows.min()) >= 0
    assert torch.equal(flows.sum(dim=1), case.counts.sum(dim=1))
    assert tuple(flows.sum(dim=0).tolist()) == plan.computed


COUNTS = torch.tensor([[500, 0, 0, 0]] * 4)


def test_a_hot_expert_is_cloned_where_that_pays() -> None:
    plan = choose_replication(COUNTS, Placement(4, 4), COSTS, slots=1)
    assert plan.busiest <= 1.05 * 500 + 1 and len(plan.clones) == 3


@pytest.mark.parametrize("dear", [{"weight_bytes": 10**9}, {"gradient_bytes": 10**9}, {"latency": 1.0}])
def test_nobody_helps_where_weights_take_longer_than_the_skew(dear: dict[str, float]) -> None:
    assert not choose_replication(COUNTS, Placement(4, 4), replace(COSTS, **dear), slots=1).clones


def test_half_a_skew_is_taken_where_the_rest_does_not_pay() -> None:
    """Links between nodes are so slow that only the neighbour helps."""
    costs = replace(COSTS, weight_bytes=60_000, far=1e7, there_bytes=1, back_bytes=1)
    plan = choose_replication(COUNTS, Placement(4, 4), costs, slots=1)
    assert [clone.rank for clone in plan.clones] == [1]


def test_no_rank_passes_an_expert_on_to_more_than_two_nodes_and_two_neighbours() -> None:
    clones = [Clone(0, rank, 1) for rank in range(64) if rank != 9]
    edges = tree_of(9, clones, 8)
    assert sorted(child for _, child in edges) == [clone.rank for clone in clones]
    far = [parent for parent, child in edges if parent // 8 != child // 8]
    near = [parent for parent, child in edges if parent // 8 == child // 8]
    assert len(far) == 7
    assert max(far.count(rank) for rank in range(64)) <= 2 and max(near.count(rank) for rank in range(64)) <= 2


def test_bytes_of_clones_are_counted_there_and_back() -> None:
    wire = COSTS.clones_wire(Placement(4, 4), ReplicationPlan((Clone(0, 1, 0), Clone(0, 3, 0)), (0,) * 4))
    near, far = wire.num_bytes.tolist()
    assert near == [[1000, 2000, 0, 0], [2000, 1000, 0, 0]]
    assert far == [[1000, 0, 0, 2000], [2000, 0, 0, 1000]]


def _pairs(plan: ReplicationPlan) -> list[tuple[int, int]]:
    return [(clone.expert, clone.rank) for clone in plan.clones]


def test_clones_stay_while_they_are_nearly_as_good_as_new_ones() -> None:
    """Rows waver by some percent, and clones take more or less of them."""
    first = choose_replication(COUNTS, Placement(4, 4), COSTS, slots=2)
    wavering = COUNTS + torch.tensor([[0, 30, 0, 0]] * 4)
    stayed = choose_replication(wavering, Placement(4, 4), COSTS, 2, before=_pairs(first))
    assert _pairs(stayed) == _pairs(first) and stayed.busiest <= 1.05 * 1.05 * 530 + 2
    assert sum(clone.rows for clone in stayed.clones) != sum(clone.rows for clone in first.clones)


def test_clones_go_where_others_are_better_and_where_rows_are_even() -> None:
    before = _pairs(choose_replication(COUNTS, Placement(4, 4), COSTS, slots=1))
    other = choose_replication(COUNTS.roll(1, 1), Placement(4, 4), COSTS, 1, before=before)
    assert {clone.expert for clone in other.clones} == {1} and other.busiest <= 1.05 * 500 + 1
    assert not choose_replication(torch.full((4, 4), 125), Placement(4, 4), COSTS, 1, before=before).clones


def test_clones_that_stay_need_no_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes seconds at a thousand ranks."""
    before = _pairs(choose_replication(COUNTS, Placement(4, 4), COSTS, slots=1))

    def plan(*args: object, **options: object) -> ReplicationPlan:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(replication_costs, "plan_replication", plan)
    assert _pairs(choose_replication(COUNTS + 3, Placement(4, 4), COSTS, 1, before=before)) == before


@given(cases())
@settings(deadline=None, max_examples=50)
def test_what_stays_takes_no_longer_than_no_help_and_is_near_a_new_plan(case: Case) -> None:
    before = _pairs(case.plan())
    later = case.counts.flip(0, 1)
    chosen, new = (choose_replication(later, case.placement, COSTS, case.slots, before=some) for some in (before, ()))
    costs = [COSTS.seconds(later, case.placement, plan) for plan in (chosen, no_replication(later, case.placement))]
    assert costs[0] <= costs[1] and chosen.slots_used() <= case.slots
    assert chosen == new or chosen.busiest <= 1.05 * max(new.busiest, 1.05 * case.counts.sum() / len(later) + 1) + 1
