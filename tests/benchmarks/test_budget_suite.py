"""What the budget suite says about its rows, and the picture of a front."""

from dataclasses import replace

import pytest
import torch

from benchmarks.budgets import LEAST, NO_BUDGET, routers_of
from benchmarks.figures import charts_of
from benchmarks.records import Row
from benchmarks.suites import jobs_of
from benchmarks.suites.budget import MODELS, QUICK, front_points
from benchmarks.summaries import summaries_of
from benchmarks.tables import conclusions
from benchmarks.workloads.model import build_architecture
from tests.benchmarks.rows import row_of

MIB = float(2**20)


def front_row(*, ours_seconds: float = 1.0, ours_peak: float = 90.0) -> Row:
    (job, *_) = jobs_of("budget", quick=False, peers=None, steps=1)
    job = replace(job, points=("eager", "compile", "memfine@0", "memfine@1"))
    series = {
        "seconds": (3.0, 2.0, 1.5, ours_seconds),
        "peak_bytes": (200 * MIB, 150 * MIB, 40 * MIB, ours_peak * MIB),
        "budget_bytes": (0.0, 0.0, 50 * MIB, 160 * MIB),
        "predicted_bytes": (0.0, 0.0, 41 * MIB, 160 * MIB),
        "compile_seconds": (0.0, 10.0, 10.0, 10.0),
        "plan_seconds": (0.0, 0.0, 0.1, 0.1),
        "partition_seconds": (0.0, 0.0, 0.7, 1.4),
        "differs_by": (0.0, 1e-6, 1e-6, 1e-6),
    }
    row = row_of("memfine", peak_mib=1, seconds=1.0)
    assert row.measurement is not None
    return replace(row, job=job, measurement=replace(row.measurement, series=series))


def prediction_row(predicted: float) -> Row:
    job = next(job for job in jobs_of("budget", quick=True, peers=None, steps=1) if "prediction" in job.workload)
    job = replace(job, points=(NO_BUDGET, LEAST))
    series = {
        "budget": (0.0, 90 * MIB),
        "predicted": (100 * MIB, predicted * MIB),
        "measured": (99 * MIB, 85 * MIB),
        "skewed_predicted": (101 * MIB, 87 * MIB),
        "skewed_measured": (100 * MIB, 86 * MIB),
    }
    row = row_of("memfine", peak_mib=1, seconds=1.0)
    assert row.measurement is not None
    return replace(row, job=job, measurement=replace(row.measurement, series=series))


@pytest.mark.parametrize(("seconds", "word"), [(1.0, "met"), (2.5, "NOT MET")])
def test_a_front_is_compared_with_the_fastest_peer_that_fits(seconds: float, word: str) -> None:
    (text,) = conclusions([front_row(ours_seconds=seconds)])
    line = next(line for line in text.splitlines() if "within its budget" in line)
    assert line.startswith(word) and f"{seconds / 2:.3f}" in line
    assert "no peer fits: 1 of 2" in text


def test_times_of_small_steps_are_not_judged() -> None:
    row = front_row(ours_seconds=2.5)
    (text,) = conclusions([replace(row, job=replace(row.job, sizes=QUICK))])
    assert "largest peak against its budget" in text and "time against" not in text


def test_a_peak_above_its_budget_is_said() -> None:
    (text,) = conclusions([front_row(ours_peak=170.0)])
    assert any(line.startswith("NOT MET") and "against its budget" in line for line in text.splitlines())


def test_planning_is_compared_with_the_cold_compile() -> None:
    (text,) = conclusions([front_row()])
    assert "met     planning against the cold compile of 7 s: 0.014" in text
    assert "further partitions of the graph, against the same: 0.200" in text


def test_the_smallest_budget_is_compared_with_what_works() -> None:
    (of_front,) = conclusions([front_row()])
    (of_predictions,) = conclusions([prediction_row(86.0)])
    assert "NOT MET smallest budget named against the bytes with which its step works: 1.250" in of_front
    assert (
        "met     smallest budget named against the fewest bytes with which a step works, largest: 1.047"
        in of_predictions
    )


@pytest.mark.parametrize(("predicted", "word"), [(86.0, "met"), (80.0, "NOT MET")])
def test_a_prediction_that_is_short_is_said(predicted: float, word: str) -> None:
    (text,) = conclusions([prediction_row(predicted)])
    assert next(line for line in text.splitlines() if "lowest prediction" in line).startswith(word)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_of_the_predictions_runs(model: str) -> None:
    (*_, job) = jobs_of("budget", quick=True, peers=None, steps=1)
    module, inputs = build_architecture(replace(job, workload=f"prediction:{model}"), torch.device("cpu"))
    assert torch.isfinite(module(**inputs).loss)
    assert list(routers_of(module))


def test_a_front_is_drawn() -> None:
    (drawn,) = (chart.svg() for chart in charts_of([front_row()]).values())
    assert "memfine, at its budget" in drawn and "memory of the whole step, MiB" in drawn
    (summary,) = summaries_of([front_row()])
    assert [point.is_ours for point in front_points(summary)] == [False, False, True, True]
