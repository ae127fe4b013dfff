"""The schedule, as every rank of a simulated group sees it: no network, only numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.schedule import AllToAll, Rounds, TokenSlices


@dataclass(frozen=True)
class Case:
    counts: torch.Tensor
    placement: Placement
    limits: list[int]
    max_sent: int
    rooms: tuple[int, ...] = ()

    def schedule(self) -> Rounds:
        return Rounds(self.counts, self.placement, self.limits, self.max_sent, self.rooms)

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(("any", "one expert", "one source", "nothing")))
    row = st.lists(st.integers(0, 12), min_size=num_experts, max_size=num_experts)
    counts = torch.tensor(draw(st.lists(row, min_size=num_ranks, max_size=num_ranks)))
    if kind == "one expert":
        counts[:, 1:] = 0
    elif kind == "one source":
        counts[1:] = 0
    elif kind == "nothing":
        counts.zero_()
    limits, rooms = (
        draw(st.lists(st.integers(*bounds), min_size=num_ranks, max_size=num_ranks)) for bounds in ((1, 20), (0, 60))
    )
    some = tuple(rooms) if draw(st.booleans()) else ()
    return Case(counts, Placement(num_experts, num_ranks), limits, draw(st.integers(1, 30)), some)


Names = list[tuple[int, int, int]]
"""Rows as (source, expert, number among the source's rows of that expert)."""


def sent_names(a2a: AllToAll, source: int) -> Names:
    return [
        (source, expert, number)
        for expert, (first, last) in enumerate(zip(a2a.first.tolist(), a2a.last.tolist(), strict=True))
        for number in range(first, last)
    ]


def delivered(case: Case, number: int) -> Iterator[list[Names]]:
    """Per all-to-all of a round what arrives at each rank, cut out of the sent rows by the senders' splits."""
    schedule = case.schedule()
    views = [schedule.all_to_alls(rank, number) for rank in range(case.num_ranks)]
    assert len({len(view) for view in views}) == 1, "ranks disagree on the number of all-to-alls"
    for all_to_alls in zip(*views, strict=True):
        inboxes: list[Names] = [[] for _ in all_to_alls]
        for source, a2a in enumerate(all_to_alls):
            rows = sent_names(a2a, source)
            assert len(rows) == a2a.num_sent
            for rank, size in enumerate(a2a.sent_splits):
                assert all_to_alls[rank].received_splits[source] == size, "sender and receiver disagree"
                inboxes[rank] += rows[:size]
                rows = rows[size:]
        yield inboxes


@given(cases())
@settings(deadline=None, max_examples=50)
def test_every_row_goes_to_its_owner_exactly_once(case: Case) -> None:
    received: list[Names] = [[] for _ in range(case.num_ranks)]
    for number in range(case.schedule().num_rounds):
        for inboxes in delivered(case, number):
            for rank, inbox in enumerate(inboxes):
                received[rank] += inbox
    expected = {
        (source, expert, row)
        for source, per_expert in enumerate(case.counts.tolist())
        for expert, count in enumerate(per_expert)
        for row in range(count)
    }
    everything = [name for names in received for name in names]
    assert len(everything) == len(expected) and set(everything) == expected
    for rank, names in enumerate(received):
        assert all(case.placement.owner(expert) == rank for _, expert, _ in names)


@given(cases())
@settings(deadline=None, max_examples=50)
def test_no_rank_receives_more_than_its_limit_in_a_round(case: Case) -> None:
    for number in range(case.schedule().num_rounds):
        for rank, limit in enumerate(case.limits):
            assert sum(a2a.num_received for a2a in case.schedule().all_to_alls(rank, number)) <= limit


@given(cases())
@settings(deadline=None, max_examples=50)
def test_rounds_are_as_few_as_the_fullest_rank_needs(case: Case) -> None:
    """One after the other as large as its rank may have it: those that are kept, then half as large ones."""
    received = case.placement.by_rank(case.counts.sum(dim=0)).tolist()
    saved = case.schedule().num_saved
    needed = []
    for rows, limit in zip(received, case.limits, strict=True):
        first = min(saved, -(-rows // limit))
        later = (limit + 1) // 2 if any(case.rooms) else limit
        needed.append(first + -(-max(0, rows - first * limit) // later))
    assert case.schedule().num_rounds == max(needed)


@given(cases())
@settings(deadline=None, max_examples=50)
def test_staging_is_bounded_as_far_as_one_row_a_destination_allows(case: Case) -> None:
    bound = max(case.max_sent, case.num_ranks)
    for number in range(case.schedule().num_rounds):
        for rank in range(case.num_ranks):
            assert all(a2a.num_sent <= bound for a2a in case.schedule().all_to_alls(rank, number))


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_even_routing_sends_evenly_in_one_all_to_all(num_ranks: int) -> None:
    counts = torch.full((num_ranks, 2 * num_ranks), 32)
    schedule = Rounds(counts, Placement(2 * num_ranks, num_ranks), 32, 2 * 32)
    for number in range(schedule.num_rounds):
        (a2a,) = schedule.all_to_alls(0, number)
        assert a2a.num_sent == 32


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([[1200, 800], [400, 2400], [900, 900], [100, 100]], id="sources differ"),
        pytest.param(
            [[2000, 0, 0, 0], [0, 900, 700, 0], [500, 0, 1500, 300], [0, 0, 0, 800]], id="walks meet a source"
        ),
        pytest.param([[4000, 50, 50, 50]] * 4, id="ranks with few rows"),
    ],
)
def test_all_to_alls_are_as_few_as_what_the_fullest_source_sends_asks_for(counts: list[list[int]]) -> None:
    """But for one, as all-to-alls are parts of what ranks receive and not of what a source sends."""
    table = torch.tensor(counts)
    rows = -(-int(table.sum()) * 9 // (4 * 8))
    schedule = Rounds(table, Placement(table.shape[1], 4), rows, -(-rows // 4))
    for number in range(schedule.num_rounds):
        by_source = [schedule.all_to_alls(rank, number) for rank in range(4)]
        sent = max(sum(a2a.num_sent for a2a in all_to_alls) for all_to_alls in by_source)
        least = max(1, -(-sent // -(-rows // 4)))
        assert least <= len(by_source[0]) <= least + 1


@given(cases())
@settings(deadline=None, max_examples=50)
def test_experts_come_one_after_the_other(case: Case) -> None:
    for rank in range(case.num_ranks):
        schedule = case.schedule()
        walked = []
        for number in range(schedule.num_rounds):
            rows = sum(a2a.received.sum(dim=0) for a2a in schedule.all_to_alls(rank, number))
            walked.append([expert for expert, count in enumerate(rows.tolist()) if count])
        flat = [expert for experts in walked for expert in experts]
        assert flat == sorted(flat)


@given(cases())
@settings(deadline=None, max_examples=50)
def test_received_before_is_the_sum_of_earlier_rounds(case: Case) -> None:
    schedule = case.schedule()
    for rank in range(case.num_ranks):
        so_far = torch.zeros(len(case.placement.owned(rank)), dtype=torch.int64)
        for number in range(schedule.num_rounds):
            assert torch.equal(schedule.received_before(rank, number), so_far)
            so_far = so_far + sum(a2a.received.sum(dim=0) for a2a in schedule.all_to_alls(rank, number))


@given(cases())
@settings(deadline=None, max_examples=100)
def test_as_many_rounds_are_kept_as_every_rank_has_room_for(case: Case) -> None:
    received = case.placement.by_rank(case.counts.sum(dim=0)).tolist()
    saved, rooms = case.schedule().num_saved, case.rooms or (0,) * case.num_ranks
    ranks = list(zip(received, case.limits, rooms, strict=True))

    def fits(number: int) -> bool:
        return all(min(rows, number * limit) <= room for rows, limit, room in ranks)

    assert fits(saved) and (saved == case.schedule().num_rounds or not fits(saved + 1))


@given(cases())
@settings(deadline=None, max_examples=50)
def test_rounds_after_those_that_are_kept_have_half_as_many_rows(case: Case) -> None:
    schedule = case.schedule()
    for number in range(schedule.num_saved, schedule.num_rounds if any(case.rooms) else 0):
        for rank, limit in enumerate(case.limits):
            assert sum(a2a.num_received for a2a in schedule.all_to_alls(rank, number)) <= (limit + 1) // 2


@pytest.mark.parametrize("load", ["even", "one rank"])
def test_a_thousand_ranks_take_less_than_a_second(load: str) -> None:
    placement = Placement(256, 1024)
    counts = torch.full((1024, 256), 128) if load == "even" else torch.zeros(1024, 256, dtype=torch.int64)
    counts[:, 0] += 4096
    started = time.process_time()
    schedule = Rounds(counts, placement, 65536, 2 * 65536)
    num_rounds = schedule.num_rounds
    for number in range(num_rounds):
        schedule.all_to_alls(17, number)
    assert num_rounds == -(-int(schedule.received.max()) // 65536)
    assert time.process_time() - started < 1.0


def test_token_slices_break_their_bound_where_rounds_do_not() -> None:
    """The hot tokens stand together: c equal slices by the count, but all rows of the hot rank in one of them."""
    placement, limit = Placement(2, 2), 8
    counts = torch.tensor([[16, 0], [16, 0]])
    bounds = torch.tensor([[[0, 0], [0, 0]], [[16, 0], [16, 0]], *([[[16, 0], [16, 0]]] * 3)])
    slices = TokenSlices(bounds, placement)
    assert slices.num_rounds == 4 == -(-int(counts[:, 0].sum()) // limit)
    assert max(slices.all_to_alls(0, number)[0].num_received for number in range(4)) == 32
    rounds = Rounds(counts, placement, limit, limit)
    assert max(sum(a2a.num_received for a2a in rounds.all_to_alls(0, number)) for number in range(4)) == limit


@given(st.integers(1, 40), st.integers(1, 12))
def test_ranges_of_experts_cover_all_in_order(num_experts: int, num_ranks: int) -> None:
    placement = Placement(num_experts, num_ranks)
    owned = [expert for rank in range(num_ranks) for expert in placement.owned(rank)]
    assert owned == list(range(num_experts))
    assert [placement.owner(expert) for expert in owned] == placement.owners().tolist()
    assert all(expert in placement.owned(placement.owner(expert)) for expert in owned)
