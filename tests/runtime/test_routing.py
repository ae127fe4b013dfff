"""Index arrays against loops over the assignments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfine_fx.runtime.routing import SliceCounter, sort_assignments

SIZES = dict(
    num_tokens=st.integers(0, 20), top_k=st.integers(1, 4), num_experts=st.integers(1, 6), seed=st.integers(0, 99)
)


def random_index(num_tokens: int, top_k: int, num_experts: int, seed: int, *, outside: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-outside, num_experts + outside, (num_tokens, top_k), generator=generator)


def rows_by_expert(index: torch.Tensor, num_experts: int) -> list[list[int]]:
    flat = index.reshape(-1).tolist()
    return [[place for place, expert in enumerate(flat) if expert == one] for one in range(num_experts)]


@settings(deadline=None, max_examples=60)
@given(**SIZES, outside=st.sampled_from([0, 2]))
def test_rows_stand_by_expert_in_token_order(
    num_tokens: int, top_k: int, num_experts: int, seed: int, outside: int
) -> None:
    index = random_index(num_tokens, top_k, num_experts, seed, outside=outside)
    order, offsets = sort_assignments(index, num_experts)
    got = [order[offsets[e] : offsets[e + 1]].tolist() for e in range(num_experts)]
    assert got == rows_by_expert(index, num_experts)


def test_index_arrays_are_small_on_the_device_and_wide_on_the_host() -> None:
    order, offsets = sort_assignments(random_index(5, 2, 3, 0), 3)
    assert (order.dtype, order.shape) == (torch.int32, (10,))
    assert (offsets.dtype, offsets.shape, offsets.device.type) == (torch.int64, (4,), "cpu")


@pytest.mark.parametrize("top_k", [1, 3])
def test_no_tokens_give_no_rows(top_k: int) -> None:
    order, offsets = sort_assignments(torch.empty(0, top_k, dtype=torch.int64), 4)
    assert order.numel() == 0
    assert offsets.tolist() == [0] * 5
    assert SliceCounter(order, offsets, top_k, 0).bounds(8).tolist() == [[0] * 4]


def test_assignments_outside_the_experts_are_dropped() -> None:
    order, offsets = sort_assignments(torch.tensor([[-1, 0], [2, 7], [0, 2]]), 3)
    assert order[offsets[0] : offsets[-1]].tolist() == [1, 4, 2, 5]
    assert offsets.diff().tolist() == [2, 0, 2]


WIDTHS = {torch.int32: 300, torch.int16: 300, torch.int8: 128, torch.uint8: 256}


@pytest.mark.parametrize("dtype", WIDTHS)
def test_ids_of_any_width_count_up_to_the_last_expert(dtype: torch.dtype) -> None:
    last = WIDTHS[dtype] - 1
    order, offsets = sort_assignments(torch.tensor([[0, last], [1, last]]).to(dtype), last + 1)
    assert order.tolist() == [0, 2, 1, 3]
    assert offsets.tolist() == [0, 1, *[2] * (last - 1), 4]


@settings(deadline=None, max_examples=60)
@given(**SIZES, outside=st.sampled_from([0, 2]), tokens_per_slice=st.integers(1, 25))
def test_slice_bounds_split_each_experts_rows_at_token_multiples(
    num_tokens: int, top_k: int, num_experts: int, seed: int, outside: int, tokens_per_slice: int
) -> None:
    index = random_index(num_tokens, top_k, num_experts, seed, outside=outside)
    order, offsets = sort_assignments(index, num_experts)
    bounds = SliceCounter(order, offsets, top_k, num_tokens).bounds(tokens_per_slice)
    assert bounds.shape == (-(-num_tokens // tokens_per_slice) + 1, num_experts)
    for first, (begin, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        tokens = range(first * tokens_per_slice, (first + 1) * tokens_per_slice)
        for expert, rows in enumerate(rows_by_expert(index, num_experts)):
            wanted = [place for place in rows if place // top_k in tokens]
            assert order[begin[expert] : end[expert]].tolist() == wanted
