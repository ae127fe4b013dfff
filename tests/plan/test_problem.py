"""What a run may save as a problem: the peak stays where it was, whatever the routing, and plans take no time."""

from __future__ import annotations

import time

import pytest

from memfine_fx.config import Config
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.step import RunMemory, step_peak_bytes
from memfine_fx.plan.budget import describe_budget
from memfine_fx.plan.problem import problem_within, problem_without_budget, run_of_plan, saving_nothing
from memfine_fx.plan.rates import DeviceRates
from memfine_fx.plan.solve import solve
from tests.plan.deep_model import TOKENS, TOP_K, DeepModel, deep_model


def solved_without_budget(config: Config, run: RunMemory) -> RunMemory:
    problem = problem_without_budget(config, run)
    assert problem is not None
    return run_of_plan(run, solve(problem))


def run_of(model: DeepModel, num_tokens: int, saved: frozenset[tuple[str, int, int]] = frozenset()) -> RunMemory:
    return RunMemory(model.step, {str(TOKENS): num_tokens}, saved=saved)


def peak(run: RunMemory, rows: int) -> int:
    found = step_peak_bytes([run], lambda region_id, tokens: ChunkSize(rows))
    assert found is not None
    return found


@pytest.mark.parametrize("rows", [1, 100, 2048])
@pytest.mark.parametrize("num_tokens", [512, 4096, 16384, 65536])
def test_a_deep_models_peak_stays_whatever_rows_its_experts_get(num_tokens: int, rows: int) -> None:
    model = deep_model(12, has_room=True)
    run = run_of(model, num_tokens)
    assert peak(solved_without_budget(model.config, run), rows) <= peak(saving_nothing(run), rows)


def test_a_longer_sequence_keeps_less() -> None:
    model = deep_model(12, has_room=True)
    shares = []
    for tokens in (512, 4096, 65536):
        run = solved_without_budget(model.config, run_of(model, tokens))
        shares.append(sum(run.num_saved_rows(region_id) for region_id in model.step.optional) / (tokens * TOP_K))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1]
    assert shares[0] >= 11


def test_more_bytes_keep_more_and_no_more_than_the_bytes_are_taken() -> None:
    model = deep_model(6, has_room=True, memory_budget="20GiB")
    run = run_of(model, 16384)
    rates = DeviceRates(((32, 1e9), (512, 4e9)), copy_bytes=1e9, launch_seconds=1e-6)
    least, most = peak(saving_nothing(run), 1), peak(run, 1)
    kept = []
    for available in range(least, most, (most - least) // 5):
        problem = problem_within(model.config, run, available, 0, lambda: rates)
        assert problem is not None
        planned = run_of_plan(run, solve(problem))
        assert peak(planned, 1) <= available
        kept.append(sum(planned.num_saved_rows(region_id) for region_id in model.step.optional))
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


@pytest.mark.parametrize(
    ("budget", "saved", "words"),
    [
        (
            None,
            {("body/0", 0, 4096)},
            "no memory_budget: 2 of 3 regions save what does not raise the step's peak",
        ),
        ("least", set(), 'memory_budget="least": regions save nothing'),
        ("20GiB", set(), "memory_budget='20GiB' bounds the bytes of a step"),
    ],
)
def test_a_report_says_which_plan_it_is_of(budget: str | None, saved: set[tuple[str, int, int]], words: str) -> None:
    model = deep_model(3, has_room=budget is None, memory_budget=budget)
    assert describe_budget(model.config, [run_of(model, 512, frozenset(saved))]) == words


def test_a_report_says_why_nothing_is_kept() -> None:
    model = deep_model(3)
    words = describe_budget(model.config, [run_of(model, 512)])
    assert words.startswith("no memory_budget: regions save nothing (")


def test_plans_of_runs_that_keep_other_things_are_other_plans() -> None:
    model = deep_model(2, has_room=True)
    saved = ((), (("body/0", 0, 4096),), (("body/0", 9, 4096),), (("body/1", 0, 4096),))
    assert len({run_of(model, 512, frozenset(one)).key for one in saved}) == 4


def test_what_48_layers_keep_is_decided_in_less_than_a_tenth_of_a_second() -> None:
    model = deep_model(48, has_room=True)
    seconds = []
    for num_tokens in (4096, 4608, 5120, 5632):
        started = time.perf_counter()
        solved_without_budget(model.config, run_of(model, num_tokens))
        seconds.append(time.perf_counter() - started)
    assert min(seconds) <= 0.1
