"""Closed forms of waiting against a simulation that shares nothing with them."""

import numpy as np
import pytest

from memfine_planner.serving.queueing import batch_sizes, first_token
from planner.tests.serving.simulator import simulate_decode, simulate_prefill

SERVICES, CHANCES = (0.05, 0.1, 0.4), (0.5, 0.35, 0.15)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize(("load", "runs"), [(0.3, 1), (0.7, 4), pytest.param(0.85, 24, marks=pytest.mark.slow)])
def test_time_to_first_token_is_what_is_simulated(load: float, runs: int, stages: int) -> None:
    rate = load * stages / float(np.dot(SERVICES, CHANCES))
    closed = first_token(rate, SERVICES, CHANCES, stages)
    assert closed is not None
    # At high load neighbours wait alike: only many runs tell 5%.
    seen = [simulate_prefill(rate, SERVICES, CHANCES, stages, requests=50_000, seed=seed) for seed in range(runs)]
    seconds = np.concatenate([one.seconds for one in seen])
    assert closed.mean_s == pytest.approx(seconds.mean(), rel=0.05)
    for chance in (0.9, 0.95):
        assert closed.quantile(chance) == pytest.approx(np.quantile(seconds, chance), rel=0.05)


def test_mean_of_equal_services_is_the_textbooks() -> None:
    closed = first_token(5.0, (0.1,), (1.0,))
    assert closed is not None
    assert closed.mean_s == pytest.approx(0.1 + 5 * 0.01 / (2 * 0.5))


def step_s(num: int) -> float:
    return 0.01 + 0.0002 * num


@pytest.mark.parametrize(("lengths", "chances"), [((100,), (1.0,)), ((20, 100, 400), (0.5, 0.3, 0.2))])
@pytest.mark.parametrize("rate", [5.0, 25.0])
def test_batch_and_time_between_tokens_are_what_is_simulated(
    rate: float, lengths: tuple[int, ...], chances: tuple[float, ...]
) -> None:
    closed = batch_sizes(rate, float(np.dot(lengths, chances)), [step_s(n) for n in range(1, 257)])
    assert closed is not None
    seen = simulate_decode(rate, lengths, chances, step_s, most=256, requests=15_000)
    assert closed.mean == pytest.approx(seen.mean_batch, rel=0.05)
    assert closed.mean_step_s == pytest.approx(seen.seconds.mean(), rel=0.05)
    assert closed.step_quantile(0.9) == pytest.approx(seen.quantile(0.9), rel=0.05)
    assert closed.waits < 1e-3


def test_queues_that_grow_without_end_are_none() -> None:
    assert first_token(10.0, (0.1,), (1.0,)) is None
    assert batch_sizes(51.0, 100.0, [step_s(n) for n in range(1, 10_000)]) is None


def test_full_batch_makes_others_wait() -> None:
    closed = batch_sizes(14.0, 100.0, [step_s(n) for n in range(1, 25)])
    assert closed is not None
    assert closed.waits > 0.1
