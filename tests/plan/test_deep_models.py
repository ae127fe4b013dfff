"""Plans of a step are solved once for all of its regions: the time grows with the layers, not with their square."""

from __future__ import annotations

import time

import pytest
import torch

from memfine_fx.memory.step import RegionMemory, step_peak, step_peak_bytes
from memfine_fx.plan.budget import choose_plan
from memfine_fx.plan.peaks import chunk_sizes, peak_of_run
from tests.plan.deep_model import TOKENS, DeepModel, at_tokens, deep_model

CPU = torch.device("cpu")
BUDGET = 1 << 45


def limit_at(model: DeepModel, num_tokens: int, rows: int) -> int:
    """Bytes with which chunks of exactly so many rows fit."""
    at_tokens(model, num_tokens, None)
    assert model.context is not None
    peak = peak_of_run(model.config, model.context, rows, 64)
    assert peak is not None
    return peak.num_bytes


def rows_of_all(model: DeepModel, num_tokens: int) -> set[int]:
    plans = [choose_plan(region_id, model, model, CPU, num_tokens) for region_id in model.step.regions]
    return {plan.rows_per_chunk for plan in plans}


def test_plans_for_another_number_of_tokens_take_less_than_a_tenth_of_a_second_at_48_layers() -> None:
    model = deep_model(48, memory_budget=BUDGET)
    seconds = []
    for num_tokens in (4096, 4608, 5120, 5632):
        at_tokens(model, num_tokens, limit_at(model, num_tokens, 1000))
        started = time.perf_counter()
        assert rows_of_all(model, num_tokens) == {1000}
        seconds.append(time.perf_counter() - started)
    assert min(seconds) <= 0.1


@pytest.mark.parametrize("num_layers", [2, 16])
def test_the_peak_is_asked_for_as_often_as_one_region_asks(num_layers: int) -> None:
    model = deep_model(num_layers, memory_budget=BUDGET)
    limit = limit_at(model, 4096, 1000)
    at_tokens(model, 4096, limit)
    choose_plan("body/0", model, model, CPU, 4096)
    once = model.peaks.num_solved
    rows_of_all(model, 4096)
    assert 1 < model.peaks.num_solved == once < 16


def test_plans_with_and_without_gradients_are_both_kept() -> None:
    model = deep_model(4, memory_budget=BUDGET)
    limit = limit_at(model, 4096, 1000)
    at_tokens(model, 4096, limit)
    without = rows_of_all(model, 4096)
    at_tokens(model, 4096, limit, gradient_bytes=1 << 20)
    with_gradients = rows_of_all(model, 4096)
    assert max(with_gradients) < max(without)
    solved = model.peaks.num_solved
    for gradient_bytes, expected in ((0, without), (1 << 20, with_gradients)):
        at_tokens(model, 4096, limit, gradient_bytes=gradient_bytes)
        assert rows_of_all(model, 4096) == expected
    assert model.peaks.num_solved == solved


def test_byte_terms_are_made_once_until_bodies_know_more() -> None:
    made, revision = [], 0

    def terms(policy: str) -> object:
        made.append(policy)
        return object()

    memory = RegionMemory(terms, TOKENS, "rows", lambda: revision)  # type: ignore[arg-type]
    assert memory.terms_now("nothing") is memory.terms_now("nothing")
    memory.terms_now("projections")
    assert made == ["nothing", "projections"]
    revision = 1
    memory.terms_now("nothing")
    assert made == ["nothing", "projections", "nothing"]


@pytest.mark.parametrize("rows", [64, 1000, None])
def test_the_bytes_of_a_peak_are_those_of_the_peak_with_its_terms(rows: int | None) -> None:
    model = deep_model(3)
    at_tokens(model, 300, None)
    assert model.context is not None
    sizes = chunk_sizes(model.config, model.step, rows, None)
    peak = step_peak([model.context], sizes)
    assert peak is not None
    assert step_peak_bytes([model.context], sizes) == peak.num_bytes
