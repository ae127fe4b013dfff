"""From byte terms and a budget to a plan: terms add up, the largest chunk that fits is found exactly."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.region_bytes import ChunkSize, RegionBytes, region_peak, region_workspace
from memfine_fx.memory.sizes import GROUPS, ROWS
from memfine_fx.plan.rows import KNEE_ROWS, plan_region
from memfine_fx.records import ChunkPlan
from memfine_fx.units import readable_bytes

FP32 = RegionBytes(
    top_k=2,
    num_experts=4,
    hidden=8,
    out_width=8,
    item_bytes=4,
    out_item_bytes=4,
    contribution_item_bytes=4,
    accumulator_item_bytes=4,
    weight_item_bytes=4,
    param_bytes=1000,
    staging_bytes=0,
    forward_peak=100 * ROWS,
    backward_peak=200 * ROWS,
    takes_group=False,
    device_type="cpu",
)
BF16 = dataclasses.replace(
    FP32,
    item_bytes=2,
    out_item_bytes=2,
    contribution_item_bytes=2,
    weight_item_bytes=2,
    staging_bytes=300,
    added_bytes=40,
)
FORWARD_BOUND = dataclasses.replace(FP32, forward_peak=10_000 * ROWS)
INDEX_BYTES = 100 * 2 * (4 + 8 + 8) + 3 * 8 * 5


def rows_plan(region: RegionBytes, num_tokens: int, **options: Any) -> ChunkPlan:
    return plan_region(region, num_tokens, axis="rows", **options)


def total(region: RegionBytes, num_tokens: int, rows: int) -> int:
    return sum(region_peak(region, num_tokens, rows).values())


def test_the_backward_terms_of_an_fp32_layer_add_up() -> None:
    assert region_peak(FP32, 100, 10) == {
        "output grad": 100 * 8 * 4,
        "hidden grad": 100 * 8 * 4,
        "routing weight grad": 100 * 2 * 4,
        "expert weight grads": 1000,
        "index": INDEX_BYTES,
        "chunk": 10 * (8 * 4 + 4 + 8 * 4 + 200 + 24),
    }


def test_the_backward_terms_of_a_bf16_layer_count_fp32_sums_casts_and_staging() -> None:
    assert region_peak(BF16, 100, 10) == {
        "output grad": 100 * 8 * 2,
        "hidden grad": 100 * 8 * (2 + 4),
        "routing weight grad": 100 * 2 * 2,
        "expert weight grads": 1000,
        "index": INDEX_BYTES,
        "chunk": 10 * (8 * 2 + 2 + 8 * 2 + 200 + 24 + 8 * 4),
        "gradient staging": 300,
    }


def test_a_product_on_its_way_into_sums_is_counted_beside_results_and_not_beside_the_body() -> None:
    region = dataclasses.replace(
        BF16, backward_results=50 * ROWS, product_scratch=sympy.Integer(5000), added_bytes=6000, staging_bytes=4000
    )
    around = 10 * (8 * 2 + 2 + 8 * 2 + 24) + 100 * 8 * (4 - 2)  # of rows, and sums over choices
    whole, split = (
        region_workspace(region, 100, ChunkSize(10, stages), "rows", "backward") for stages in (False, True)
    )
    assert whole == around + 50 * 10 + 5000
    assert split == around + 50 * 10 + (5000 + 2000) + 4000
    body = dataclasses.replace(region, backward_peak=1000 * ROWS)
    assert region_workspace(body, 100, ChunkSize(10, True), "rows", "backward") == around + 1000 * 10 + 4000


def test_token_slices_stage_the_gradients_of_every_expert() -> None:
    assert region_peak(BF16, 100, 10, "tokens")["gradient staging"] == 300 * BF16.num_experts


def test_the_forward_terms_count_where_forward_is_larger() -> None:
    assert region_peak(FORWARD_BOUND, 100, 10) == {
        "output": 100 * 8 * 4,
        "index": INDEX_BYTES,
        "chunk": 10 * (8 * 4 + 4 + 10_000 + 24),
    }


def test_the_forward_terms_of_a_bf16_layer_hold_the_fp32_sum_and_its_cast() -> None:
    peak = region_peak(dataclasses.replace(BF16, forward_peak=10_000 * ROWS), 100, 10)
    assert peak["output"] == 100 * 8 * (2 + 4)
    assert peak["chunk"] == 10 * (8 * 2 + 2 + 10_000 + 24 + 8 * 4)


def test_a_layer_without_routing_weight_has_no_gradient_of_it() -> None:
    assert region_peak(dataclasses.replace(FP32, weight_item_bytes=0), 100, 10)["routing weight grad"] == 0


def test_index_arrays_grow_with_tokens_choices_and_experts() -> None:
    wider = dataclasses.replace(FP32, top_k=4, num_experts=9)
    assert region_peak(wider, 50, 10)["index"] == 50 * 4 * 20 + 24 * 10


def test_a_grouped_body_is_counted_for_all_experts() -> None:
    grouped = dataclasses.replace(FP32, backward_peak=200 * ROWS + 1000 * GROUPS, takes_group=True)
    assert region_peak(grouped, 100, 10)["chunk"] == region_peak(FP32, 100, 10)["chunk"] + 1000 * 4


def test_rows_beyond_the_routed_ones_cost_nothing() -> None:
    assert region_peak(FP32, 100, 10**6) == region_peak(FP32, 100, 200)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_hardly_any_tokens_still_have_a_plan(num_tokens: int) -> None:
    plan = rows_plan(FP32, num_tokens)
    assert 1 <= plan.rows_per_chunk <= 2


@pytest.mark.parametrize(
    ("device_type", "num_tokens", "rows"),
    [
        ("cpu", 100_000, KNEE_ROWS["cpu"]),
        ("cuda", 100_000, KNEE_ROWS["cuda"]),
        ("xpu", 100_000, KNEE_ROWS["cuda"]),
        ("cpu", 30, 60),
    ],
)
def test_without_a_budget_the_chunk_is_the_throughput_knee(device_type: str, num_tokens: int, rows: int) -> None:
    plan = rows_plan(dataclasses.replace(FP32, device_type=device_type), num_tokens)
    assert plan.rows_per_chunk == rows
    assert plan.reason == f"throughput knee of {device_type}"
    assert plan.predicted_bytes == total(FP32, num_tokens, rows)


@pytest.mark.parametrize(("fixed", "rows"), [(7, 7), (200, 200), (500, 200)])
def test_rows_fixed_by_the_config_are_kept_up_to_the_routed_ones(fixed: int, rows: int) -> None:
    plan = rows_plan(FP32, 100, rows_per_chunk=fixed)
    assert (plan.rows_per_chunk, plan.reason) == (rows, "rows per chunk fixed by the config")


def test_a_wide_budget_changes_nothing_but_the_reason() -> None:
    plan = rows_plan(FP32, 100, available_bytes=10**9)
    assert (plan.rows_per_chunk, plan.reason) == (200, "throughput knee of cpu, within the budget")


def test_fixed_rows_shrink_to_the_budget() -> None:
    plan = rows_plan(FP32, 100, rows_per_chunk=150, available_bytes=total(FP32, 100, 90))
    assert plan.rows_per_chunk == 90


@pytest.mark.parametrize("slack", [0, 1])
def test_the_reason_of_a_budgeted_chunk_names_the_bytes(slack: int) -> None:
    available = total(FP32, 100, 90) + slack
    plan = rows_plan(FP32, 100, available_bytes=available)
    assert plan.reason == f"largest chunk with which the step keeps within {readable_bytes(available)}"
    assert plan.rows_per_chunk == 90


PIECEWISE = dataclasses.replace(FP32, backward_peak=sympy.Max(200 * ROWS, 90 * ROWS + 9_000))


@settings(max_examples=40, deadline=None)
@given(
    region=st.sampled_from([FP32, BF16, FORWARD_BOUND, PIECEWISE]),
    num_tokens=st.integers(33, 600),
    fraction=st.floats(0, 1),
)
def test_the_largest_chunk_within_a_budget_is_found_exactly(
    region: RegionBytes, num_tokens: int, fraction: float
) -> None:
    most = min(KNEE_ROWS["cpu"], 2 * num_tokens)
    low, high = total(region, num_tokens, 64), total(region, num_tokens, most)
    available = low + int(fraction * (high - low))
    rows = rows_plan(region, num_tokens, available_bytes=available).rows_per_chunk
    assert total(region, num_tokens, rows) <= available
    assert rows == most or total(region, num_tokens, rows + 1) > available


@settings(max_examples=40, deadline=None)
@given(
    region=st.sampled_from([FP32, BF16, FORWARD_BOUND, PIECEWISE]),
    num_tokens=st.integers(1, 300),
    rows=st.integers(1, 700),
)
def test_the_peak_never_falls_with_more_rows_or_more_tokens(region: RegionBytes, num_tokens: int, rows: int) -> None:
    peak = total(region, num_tokens, rows)
    assert peak <= total(region, num_tokens, rows + 1)
    assert peak <= total(region, num_tokens + 1, rows)


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(40, 400), available=st.integers(30_000, 300_000), more=st.integers(0, 50_000))
def test_a_larger_budget_never_gives_a_smaller_chunk(num_tokens: int, available: int, more: int) -> None:
    def rows(available_bytes: int) -> int:
        try:
            return rows_plan(FP32, num_tokens, available_bytes=available_bytes).rows_per_chunk
        except BudgetInfeasible:
            return 0

    assert rows(available) <= rows(available + more)


@pytest.mark.parametrize("static_bytes", [0, 12_345])
def test_the_minimum_of_an_infeasible_budget_is_exactly_feasible(static_bytes: int) -> None:
    def plan(budget: int) -> ChunkPlan:
        return rows_plan(FP32, 100, budget_bytes=budget, available_bytes=budget - static_bytes)

    with pytest.raises(BudgetInfeasible) as caught:
        plan(5_000)
    minimum = caught.value.minimum_bytes
    assert plan(minimum).rows_per_chunk == 64
    with pytest.raises(BudgetInfeasible):
        plan(minimum - 1)


def test_an_infeasible_budget_names_the_largest_terms_first() -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        rows_plan(FP32, 100, available_bytes=10)
    terms = caught.value.largest_terms
    assert terms[0] == ("chunk", 64 * 292)
    assert [num_bytes for _, num_bytes in terms] == sorted((num_bytes for _, num_bytes in terms), reverse=True)
    assert caught.value.budget_bytes == 10


@pytest.mark.parametrize(("min_rows", "minimum_rows"), [(16, 16), (64, 64), (1000, 200)])
def test_the_planner_never_goes_below_min_rows(min_rows: int, minimum_rows: int) -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        rows_plan(FP32, 100, available_bytes=10, min_rows=min_rows)
    assert caught.value.minimum_bytes == total(FP32, 100, minimum_rows)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"tokens_per_chunk": 10}, 10),
        ({"tokens_per_chunk": 500}, 100),
        ({"rows_per_chunk": 30}, 15),
        ({"rows_per_chunk": 1}, 1),
        ({}, 100),
    ],
)
def test_token_slices_come_from_the_config_or_from_rows_and_top_k(options: dict[str, int], tokens: int) -> None:
    plan = plan_region(FP32, 100, axis="tokens", **options)
    assert (plan.axis, plan.tokens_per_chunk) == ("tokens", tokens)
    assert "token slices of" in plan.reason


def test_no_tokens_still_make_a_valid_token_plan() -> None:
    plan = plan_region(FP32, 0, axis="tokens")
    assert (plan.rows_per_chunk, plan.tokens_per_chunk) == (1, 1)


def test_a_budget_bounds_the_token_axis_too() -> None:
    with pytest.raises(BudgetInfeasible):
        plan_region(FP32, 100, axis="tokens", budget_bytes=10, available_bytes=10)
