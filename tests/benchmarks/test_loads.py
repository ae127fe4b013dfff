"""Made loads: exact counts, and tokens that the unmodified block routes exactly so."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.loads import choose_experts, expert_counts
from benchmarks.workloads.layer import build_block, draw_inputs
from tests.benchmarks.rows import EAGER, TINY

LOADS = ["balanced", "zipf:0.5", "zipf:2", "one"]


@given(
    load=st.sampled_from(LOADS),
    tokens=st.integers(1, 300),
    experts=st.integers(1, 40),
    top_k=st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_counts_add_up_and_no_expert_has_more_rows_than_tokens(
    load: str, tokens: int, experts: int, top_k: int
) -> None:
    top_k = min(top_k, experts)

    counts = expert_counts(load, tokens, experts, top_k)

    assert sum(counts) == tokens * top_k
    assert max(counts) <= tokens and min(counts) >= 0


@pytest.mark.parametrize("load", LOADS)
def test_chosen_experts_are_distinct_and_have_the_counts(load: str) -> None:
    counts = expert_counts(load, 50, 8, 3)

    chosen = choose_experts(counts, 50, torch.Generator().manual_seed(0))

    assert all(len(set(row.tolist())) == 3 for row in chosen)
    assert torch.bincount(chosen.flatten(), minlength=8).tolist() == counts


def test_all_tokens_choose_the_same_experts_under_load_one() -> None:
    assert expert_counts("one", 10, 4, 2) == [10, 10, 0, 0]


def test_the_paper_s_layers_grow_more_skewed_with_depth() -> None:
    shallow, deep = (expert_counts(f"paper:{layer}", 1000, 8, 4) for layer in (4, 15))

    assert deep[0] > shallow[0] and sum(deep) == sum(shallow) == 4000


@pytest.mark.parametrize("load", ["flat", "paper:15"])
def test_a_load_that_cannot_be_made_is_refused(load: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        expert_counts(load, 10, 300, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load", ["zipf:1.5", "one"])
def test_the_unmodified_router_chooses_as_the_load_says(load: str, dtype: str) -> None:
    pytest.importorskip("transformers")
    from dataclasses import replace

    job = replace(EAGER, load=load, dtype=dtype)

    hidden, _ = draw_inputs(job, TINY, load)
    *_, index = build_block(job).gate(hidden.flatten(0, 1))

    counts = torch.bincount(index.flatten(), minlength=TINY.experts).tolist()
    assert counts == expert_counts(load, TINY.tokens, TINY.experts, TINY.top_k)
