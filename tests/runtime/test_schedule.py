"""The order in which rows are walked: every row once, chunks bounded, flags true; for any routing."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memfine_fx.runtime.schedule import Chunk, cut_at, rows_schedule, split_chunk, tokens_schedule

COUNTS = st.lists(st.one_of(st.just(0), st.integers(0, 40)), max_size=9)
FIRST = st.sampled_from([0, 5])
ROWS = st.integers(1, 50)
GROUPS = st.booleans()


def offsets_of(counts: list[int], first: int = 0) -> list[int]:
    return list(itertools.accumulate(counts, initial=first))


def owners(chunks: list[Chunk]) -> list[tuple[int, int]]:
    """(row, expert) in walking order."""
    walked: list[tuple[int, int]] = []
    for chunk in chunks:
        begin = 0
        for group, end in enumerate(chunk.ends):
            walked += [(chunk.start + row, chunk.first_expert + group) for row in range(begin, end)]
            begin = end
    return walked


@given(COUNTS, FIRST, ROWS, GROUPS)
def test_every_row_is_walked_once_in_order_by_its_own_expert(
    counts: list[int], first: int, rows: int, groups: bool
) -> None:
    walked = owners(rows_schedule(offsets_of(counts, first), rows, groups=groups))
    expected = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert walked == list(enumerate(expected, start=first))


@given(COUNTS, ROWS, GROUPS)
@example([3, 3], 5, True)
@example([3, 3], 6, True)
def test_no_chunk_is_empty_or_larger_than_asked(counts: list[int], rows: int, groups: bool) -> None:
    assert all(0 < chunk.num_rows <= rows for chunk in rows_schedule(offsets_of(counts), rows, groups=groups))


@given(COUNTS, ROWS, GROUPS)
def test_the_ends_of_a_chunk_cover_its_rows(counts: list[int], rows: int, groups: bool) -> None:
    for chunk in rows_schedule(offsets_of(counts), rows, groups=groups):
        assert chunk.ends[-1] == chunk.num_rows
        assert list(chunk.ends) == sorted(chunk.ends)
        assert chunk.last_expert == chunk.first_expert + len(chunk.ends) - 1


@given(COUNTS, ROWS, GROUPS)
def test_a_chunk_is_a_part_exactly_when_others_hold_its_expert(counts: list[int], rows: int, groups: bool) -> None:
    chunks = rows_schedule(offsets_of(counts), rows, groups=groups)
    holders = Counter(expert for chunk in chunks for expert in {owner for _, owner in owners([chunk])})
    for chunk in chunks:
        assert chunk.is_part == any(holders[expert] > 1 for _, expert in owners([chunk]))


@given(COUNTS, ROWS, GROUPS)
def test_a_chunk_completes_exactly_when_it_is_the_last_of_its_expert(
    counts: list[int], rows: int, groups: bool
) -> None:
    offsets = offsets_of(counts)
    for chunk in rows_schedule(offsets, rows, groups=groups):
        assert chunk.completes == (chunk.stop == offsets[chunk.last_expert + 1])


@given(COUNTS, ROWS)
def test_only_whole_experts_share_a_chunk(counts: list[int], rows: int) -> None:
    offsets = offsets_of(counts)
    for chunk in rows_schedule(offsets, rows, groups=True):
        if not chunk.is_part:
            assert (chunk.start, chunk.stop) == (offsets[chunk.first_expert], offsets[chunk.last_expert + 1])
        else:
            assert len(chunk.ends) == 1


@given(COUNTS, ROWS)
def test_an_expert_is_split_into_as_few_near_equal_parts_as_possible(counts: list[int], rows: int) -> None:
    chunks = rows_schedule(offsets_of(counts), rows, groups=False)
    for expert, count in enumerate(counts):
        sizes = [chunk.num_rows for chunk in chunks if chunk.first_expert == expert]
        assert len(sizes) == -(-count // rows)
        assert not sizes or max(sizes) - min(sizes) <= 1


def test_groups_fill_a_chunk_before_the_next_begins() -> None:
    chunks = rows_schedule([0, 3, 3, 5, 10, 11], 6, groups=True)
    assert [(chunk.start, chunk.stop, chunk.first_expert, chunk.ends) for chunk in chunks] == [
        (0, 5, 0, (3, 3, 5)),
        (5, 11, 3, (5, 6)),
    ]


def test_a_large_expert_interrupts_a_group() -> None:
    chunks = rows_schedule([0, 2, 9, 11], 4, groups=True)
    assert [(chunk.start, chunk.stop, chunk.is_part, chunk.completes) for chunk in chunks] == [
        (0, 2, False, True),
        (2, 5, True, False),
        (5, 9, True, True),
        (9, 11, False, True),
    ]


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0], [4, 4]])
@pytest.mark.parametrize("groups", [True, False])
def test_no_rows_make_no_chunks(offsets: list[int], groups: bool) -> None:
    assert rows_schedule(offsets, 3, groups=groups) == []


def test_token_slices_are_walked_slice_by_slice_expert_by_expert() -> None:
    chunks = tokens_schedule([[0, 4], [2, 4], [4, 7]])
    assert chunks == [
        Chunk(0, 2, 0, (2,), is_part=True, completes=False),
        Chunk(2, 4, 0, (2,), is_part=True, completes=False),
        Chunk(4, 7, 1, (3,), is_part=True, completes=False),
    ]


@given(COUNTS, FIRST, ROWS, ROWS, GROUPS)
def test_parts_of_a_chunk_walk_its_rows_by_their_experts(
    counts: list[int], first: int, rows: int, smaller: int, groups: bool
) -> None:
    for chunk in rows_schedule(offsets_of(counts, first), rows, groups=groups):
        parts = split_chunk(chunk, smaller, groups=groups)
        assert owners(parts) == owners([chunk])
        assert all(0 < part.num_rows <= smaller for part in parts)


@given(COUNTS, ROWS, ROWS, GROUPS)
def test_parts_of_a_chunk_are_parts_of_their_expert_and_only_the_last_completes_it(
    counts: list[int], rows: int, smaller: int, groups: bool
) -> None:
    offsets = offsets_of(counts)
    whole = rows_schedule(offsets, rows, groups=groups)
    parts = [part for chunk in whole for part in split_chunk(chunk, smaller, groups=groups)]
    holders = Counter(expert for part in parts for expert in {owner for _, owner in owners([part])})
    for part in parts:
        assert part.is_part == any(holders[expert] > 1 for _, expert in owners([part]))
        assert part.completes == (part.stop == offsets[part.last_expert + 1])


def test_parts_of_a_token_slice_never_complete_an_expert() -> None:
    (chunk,) = tokens_schedule([[2], [7]])
    parts = split_chunk(chunk, 2, groups=False)
    assert [part.num_rows for part in parts] == [1, 2, 2]
    assert all(part.is_part and not part.completes for part in parts)


@given(COUNTS, ROWS)
def test_a_group_ends_with_an_expert_that_has_rows(counts: list[int], rows: int) -> None:
    for chunk in rows_schedule(offsets_of(counts), rows, groups=True):
        assert chunk.ends[-1] > (chunk.ends[-2] if len(chunk.ends) > 1 else 0)


@settings(deadline=None)
@given(COUNTS, FIRST, ROWS, GROUPS, st.integers(0, 370))
def test_a_border_lies_inside_no_chunk_and_all_else_is_as_it_was(
    counts: list[int], first: int, rows: int, groups: bool, border: int
) -> None:
    whole = rows_schedule(offsets_of(counts, first), rows, groups=groups)
    parts = cut_at(whole, border)
    assert not any(chunk.start < border < chunk.stop for chunk in parts)
    assert owners(parts) == owners(whole)
    for chunk in parts:
        assert chunk.ends[-1] == chunk.num_rows > 0
        assert len(chunk.ends) == 1 or not chunk.is_part
    holders = Counter(expert for chunk in parts for expert in {expert for _, expert in owners([chunk])})
    for chunk in parts:
        experts = {expert for _, expert in owners([chunk])}
        assert chunk.is_part == any(holders[expert] > 1 for expert in experts)
        last = max(place for place, one in enumerate(parts) if experts & {expert for _, expert in owners([one])})
        assert chunk.completes == (parts[last] is chunk)
