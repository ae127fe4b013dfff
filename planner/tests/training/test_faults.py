"""Failures: the analytic form against the event simulation, the best interval, spares, limits."""

import math
from dataclasses import replace
from typing import Any

import pytest

from memfine_fx.errors import ConfigError
from memfine_planner.training.faults import (
    PUBLISHED_RATE_PER_GPU_HOUR,
    CheckpointCost,
    FaultModel,
    best_interval,
    crash_rate,
    daly_interval,
    goodput,
    per_gpu_rate,
    sensitivity,
    simulate,
    young_interval,
)

BLOCKING = CheckpointCost(1e12, 30.0, 0.0, 30.0)
ASYNC = CheckpointCost(1e12, 5.0, 120.0, 30.0)


def test_published_rate_gives_an_interruption_every_three_hours() -> None:
    assert per_gpu_rate(466, 54, 16384) == PUBLISHED_RATE_PER_GPU_HOUR
    assert FaultModel().mtbf(16384) / 3600 == pytest.approx(54 * 24 / 466)


@pytest.mark.parametrize("cost", [BLOCKING, ASYNC], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize(("gpus", "spares", "years"), [(1024, 1, 100), (16384, 64, 12), (16384, 5, 20)])
@pytest.mark.parametrize("factor", [0.3, 1, 5])
def test_analytic_goodput_agrees_with_the_simulation(
    cost: CheckpointCost, gpus: int, spares: int, years: int, factor: float
) -> None:
    faults = FaultModel(spares=spares)
    interval = factor * best_interval(cost, faults, gpus).interval
    simulated = simulate(interval, cost, faults, gpus, days=365 * years, seed=1)
    assert goodput(interval, cost, faults, gpus).fraction == pytest.approx(simulated, rel=0.02)


def test_fractions_add_up_to_one() -> None:
    result = goodput(600, ASYNC, FaultModel(spares=3), 16384)
    parts = result.fraction + result.saving + result.lost_work + result.down + result.waiting
    assert parts == pytest.approx(1)


def test_best_interval_is_a_maximum_near_dalys() -> None:
    faults = FaultModel(spares=1000)
    best = best_interval(BLOCKING, faults, 16384)
    assert best.interval == pytest.approx(daly_interval(30.0, best.mtbf), rel=0.01)
    assert best.interval == pytest.approx(young_interval(30.0, best.mtbf), rel=0.05)
    for factor in (0.8, 1.25):
        assert goodput(factor * best.interval, BLOCKING, faults, 16384).fraction < best.fraction


def test_goodput_falls_with_the_failure_rate_and_rises_with_spares() -> None:
    curve = [result.fraction for _, result in sensitivity(ASYNC, FaultModel(spares=50), 16384)]
    assert curve == sorted(curve, reverse=True)
    by_spares = [best_interval(ASYNC, FaultModel(spares=n), 16384).fraction for n in (0, 2, 8, 32)]
    assert by_spares == sorted(by_spares)


def test_without_failures_only_saving_is_lost() -> None:
    result = goodput(95, ASYNC, FaultModel(rate_per_gpu_hour=0), 1024)
    assert result.fraction == pytest.approx(0.95)
    assert math.isinf(result.mtbf)


def test_cluster_that_fails_before_it_restarts_makes_no_progress() -> None:
    hopeless = FaultModel(rate_per_gpu_hour=1.0, restart=3600)
    assert best_interval(BLOCKING, hopeless, 16384).fraction < 1e-6


@pytest.mark.parametrize("field", ["rate_per_gpu_hour", "restart", "repair"])
def test_negative_values_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=-1 must not be negative"):
        replace(FaultModel(), **{field: -1})


@pytest.mark.parametrize("change", [{"shape": 0.0}, {"batches": ((0, 1.0),)}, {"batches": ((2, -1.0),)}])
def test_shape_and_batches_must_be_positive(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        FaultModel(**change)


def test_crashes_of_the_job_cost_time_but_no_nodes() -> None:
    crashing = FaultModel(spares=4, crashes_per_hour=2.0)
    interval = best_interval(ASYNC, crashing, 1024).interval
    simulated = simulate(interval, ASYNC, crashing, 1024, days=4000, seed=2)
    found = goodput(interval, ASYNC, crashing, 1024)
    assert found.fraction == pytest.approx(simulated, rel=0.02)
    assert found.fraction < best_interval(ASYNC, FaultModel(spares=4), 1024).fraction - 0.1
    assert crashing.node_share(1024) < 0.05 * crashing.needs_node


def test_job_that_runs_out_of_memory_in_every_step_makes_no_progress() -> None:
    assert crash_rate(0.0, 10.0) == 0
    assert crash_rate(0.001, 10.0) == pytest.approx(0.36, rel=1e-3)
    hopeless = FaultModel(spares=4, crashes_per_hour=crash_rate(1.0, 10.0))
    assert best_interval(BLOCKING, hopeless, 64).fraction < 1e-3
