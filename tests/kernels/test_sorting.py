"""The counting sort against a stable comparison sort."""

from __future__ import annotations

import pytest
import torch

from memfine_fx.runtime import routing
from tests.kernels.cases import DEVICE, PATTERNS, Sizes, expert_index, in_kernels

pytestmark = in_kernels

# No token; one; less than a block of 128; several blocks; one expert; experts that are no power of two.
SIZES = (
    Sizes(tokens=0),
    Sizes(tokens=1, top_k=1),
    Sizes(tokens=13, top_k=3),
    Sizes(tokens=193, top_k=2, experts=7),
    Sizes(tokens=150, top_k=1, experts=1),
    Sizes(tokens=40, top_k=8, experts=130),
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_counting_sort_is_the_stable_sort(pattern: str, sizes: Sizes) -> None:
    from memfine_fx.kernels.sorting import reference_sort, sort_assignments

    index = expert_index(pattern, sizes)
    found, expected = sort_assignments(index, sizes.experts), reference_sort(index, sizes.experts)
    num_routed = int(expected.offsets[-1])
    assert torch.equal(found.offsets, expected.offsets)
    assert torch.equal(found.order[:num_routed], expected.order[:num_routed])
    assert torch.equal(found.inverse, expected.inverse)


def test_counting_sort_is_what_the_chunk_loop_sorts_by() -> None:
    from memfine_fx.kernels.sorting import sort_assignments

    index = expert_index("random", Sizes(tokens=97, top_k=3, experts=9))
    found, (order, offsets) = sort_assignments(index, 9), routing.sort_assignments(index, 9)
    assert torch.equal(found.order, order)
    assert torch.equal(found.offsets.long().cpu(), offsets)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int32, torch.int64))
def test_ids_of_any_integers_are_sorted(dtype: torch.dtype) -> None:
    from memfine_fx.kernels.sorting import reference_sort, sort_assignments

    index = torch.tensor([[3, 0], [1, 3], [200, 2]], dtype=dtype, device=DEVICE)
    found, expected = sort_assignments(index, 4), reference_sort(index, 4)
    assert torch.equal(found.order[:5], expected.order[:5])
    assert torch.equal(found.inverse, expected.inverse)


def test_an_id_beyond_32_bits_is_dropped_and_not_wrapped() -> None:
    from memfine_fx.kernels.sorting import sort_assignments

    found = sort_assignments(torch.tensor([[1, 2**32]], device=DEVICE), 2)
    assert found.offsets.tolist() == [0, 0, 1]
    assert found.inverse.tolist() == [0, -1]
