"""Chunks decided from the rows that came: bounded under any routing, few, even, and steady from step to step."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.mact import ChunkTuner, Settled
from memfine_fx.runtime.routing import sort_assignments
from memfine_fx.runtime.schedule import Chunk, even_rows, rows_schedule

NUM_EXPERTS = 6
TOP_K = 2
TOKENS = st.integers(0, 60)
ROWS = st.integers(1, 40)
BINS = st.sampled_from([None, (1, 2, 4, 8), (3,)])
SEEDS = st.integers(0, 10**6)


def routed(num_tokens: int, seed: int, skew: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS) + skew * torch.arange(NUM_EXPERTS)
    return sort_assignments(scores.topk(TOP_K, dim=-1).indices, NUM_EXPERTS)


def decide(
    tuner: ChunkTuner,
    plan: ChunkPlan,
    num_tokens: int,
    seed: int,
    *,
    skew: float = 0.0,
    groups: bool = False,
    is_new_step: bool = True,
) -> list[Chunk]:
    order, offsets = routed(num_tokens, seed, skew)
    return tuner.chunks(
        plan, order, offsets, top_k=TOP_K, num_tokens=num_tokens, groups=groups, is_new_step=is_new_step
    )


def rows_plan(rows: int) -> ChunkPlan:
    return ChunkPlan("rows", rows, 0, 0, "")


def tokens_plan(tokens: int) -> ChunkPlan:
    return ChunkPlan("tokens", tokens, tokens, 0, "")


def num_slices(chunks: list[Chunk]) -> int:
    """Slices begin again at an earlier expert (or at the same one)."""
    experts = [chunk.first_expert for chunk in chunks]
    return sum(after <= before for before, after in itertools.pairwise(experts)) + bool(experts)


@given(TOKENS, ROWS, BINS, SEEDS, st.booleans(), st.sampled_from(["rows", "tokens"]), st.sampled_from([0.0, 0.5]))
def test_every_row_is_walked_once_and_no_chunk_exceeds_the_plan(
    num_tokens: int,
    rows: int,
    bins: tuple[int, ...] | None,
    seed: int,
    groups: bool,
    axis: str,
    skew: float,
) -> None:
    plan = rows_plan(rows) if axis == "rows" else tokens_plan(rows)
    tuner = ChunkTuner(bins)
    for step in range(3):
        groups_here = groups and axis == "rows"
        chunks = decide(tuner, plan, num_tokens, seed + step, skew=skew, groups=groups_here, is_new_step=step != 1)
        walked = sorted(row for chunk in chunks for row in range(chunk.start, chunk.stop))
        assert walked == list(range(num_tokens * TOP_K))
        assert all(0 < chunk.num_rows <= rows for chunk in chunks)


def test_slices_grow_where_routing_is_balanced_and_shrink_where_it_is_not() -> None:
    balanced = decide(ChunkTuner(), tokens_plan(10), 60, 0)
    skewed = decide(ChunkTuner(), tokens_plan(10), 60, 0, skew=10.0)
    assert num_slices(balanced) < 60 // 10 == num_slices(skewed)
    assert max(chunk.num_rows for chunk in balanced) <= 10


def test_slices_that_the_user_fixed_stay() -> None:
    assert num_slices(decide(ChunkTuner(keeps_slices=True), tokens_plan(10), 60, 0)) == 6


@pytest.mark.parametrize(("rows", "expected"), [(128, 1), (127, 2), (64, 2), (63, 4), (32, 4), (16, 8), (15, 16)])
def test_bins_raise_the_number_of_chunks_to_the_next(rows: int, expected: int) -> None:
    """One expert takes every row of K = 1, so chunks are counted without the ends of experts."""
    order, offsets = sort_assignments(torch.zeros(128, 1, dtype=torch.int64), NUM_EXPERTS)
    tuner = ChunkTuner((1, 2, 4, 8))
    chunks = tuner.chunks(rows_plan(rows), order, offsets, top_k=1, num_tokens=128, groups=False, is_new_step=True)
    assert len(chunks) == expected


@pytest.mark.parametrize("bins", [(1, 2, 4, 8), (3, 6)])
def test_bins_hold_for_token_slices(bins: tuple[int, ...]) -> None:
    for seed in range(5):
        chunks = decide(ChunkTuner(bins), tokens_plan(13), 48, seed)
        assert num_slices(chunks) in bins


def test_a_rise_is_followed_at_once_and_a_fall_late() -> None:
    settled = Settled(patience=3)
    asked = [2, 4, 2, 2, 1, 1, 1, 1, 8, 1, 8, 1, 1, 1]
    assert [settled.settle(required) for required in asked] == [2, 4, 4, 4, 2, 2, 2, 1, 8, 8, 8, 8, 8, 1]


def test_routing_that_hovers_between_two_numbers_does_not_flap() -> None:
    tuner = ChunkTuner((1, 2, 4, 8))
    counts = [num_slices(decide(tuner, tokens_plan(12), 48, step, skew=0.3 * (step % 2))) for step in range(20)]
    free = [num_slices(decide(ChunkTuner((1, 2, 4, 8)), tokens_plan(12), 48, s, skew=0.3 * (s % 2))) for s in range(20)]
    assert sum(before != after for before, after in itertools.pairwise(free)) > 5
    assert sum(before != after for before, after in itertools.pairwise(counts)) <= 1
    assert all(count >= least for count, least in zip(counts, free, strict=True))


def test_walking_an_earlier_step_again_decides_nothing() -> None:
    tuner = ChunkTuner((1, 2, 4, 8), patience=1)
    decide(tuner, tokens_plan(12), 48, 0, skew=10.0)
    before = tuner._settled.in_use
    decide(tuner, tokens_plan(12), 48, 0, is_new_step=False)
    assert tuner._settled.in_use == before
    decide(tuner, tokens_plan(12), 48, 0)
    assert tuner._settled.in_use < before


@pytest.mark.parametrize("axis", ["rows", "tokens"])
def test_backward_takes_the_chunks_of_its_forward_unless_the_plan_was_lowered(axis: str) -> None:
    tuner = ChunkTuner()
    order, offsets = routed(48, 0)

    def chunks(rows: int, *, is_new_step: bool) -> list[Chunk]:
        plan = rows_plan(rows) if axis == "rows" else tokens_plan(rows)
        return tuner.chunks(plan, order, offsets, top_k=TOP_K, num_tokens=48, groups=False, is_new_step=is_new_step)

    forward = chunks(12, is_new_step=True)
    assert chunks(12, is_new_step=False) is forward
    lowered = chunks(5, is_new_step=False)
    assert max(chunk.num_rows for chunk in lowered) <= 5
    assert chunks(12, is_new_step=True) is not forward


COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=12)


@given(COUNTS, st.integers(1, 80), st.integers(0, 90))
def test_even_groups_are_no_more_and_split_no_further_expert(counts: list[int], rows: int, held: int) -> None:
    offsets = [sum(counts[:end]) for end in range(len(counts) + 1)]
    plain = rows_schedule(offsets, rows, groups=True)
    chosen = even_rows(offsets, rows, held)
    even = rows_schedule(offsets, chosen, groups=True)
    assert chosen <= rows
    assert len(even) == len(plain)
    assert max((chunk.num_rows for chunk in even), default=0) <= max((chunk.num_rows for chunk in plain), default=0)
    assert {c.first_expert for c in even if c.is_part} == {c.first_expert for c in plain if c.is_part}


def test_a_short_last_group_is_evened_out() -> None:
    offsets = list(range(0, 34 * 10 + 1, 10))
    sizes = [chunk.num_rows for chunk in rows_schedule(offsets, even_rows(offsets, 320), groups=True)]
    assert [chunk.num_rows for chunk in rows_schedule(offsets, 320, groups=True)] == [320, 20]
    assert max(sizes) - min(sizes) <= 20 and len(sizes) == 2


def test_even_rows_are_kept_while_they_serve() -> None:
    offsets = list(range(0, 34 * 10 + 1, 10))
    assert even_rows(offsets, 320, held=230) == 230
    assert even_rows(offsets, 320, held=160) != 160
