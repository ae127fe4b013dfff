"""The model against published runs; the targets it must keep."""

import json
from pathlib import Path

import pytest

from memfine_fx.errors import ConfigError
from memfine_planner.costs.calibration import fitted, priors
from memfine_planner.training.fitting import fit
from memfine_planner.training.runs import load_runs, outside_runs, published, published_runs
from memfine_planner.training.validation import Validation, check_runs, runs_table, validate


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate()


def test_packaged_calibration_is_the_fit_to_the_packaged_runs() -> None:
    again = fit(published_runs(), start=fitted()).calibration
    for prior in priors():
        assert getattr(fitted(), prior.name) == pytest.approx(getattr(again, prior.name), rel=1e-3)


def test_fitted_numbers_stay_near_what_is_believed() -> None:
    for prior in priors():
        ratio = getattr(fitted(), prior.name) / prior.median
        assert abs(ratio - 1) < 2 * prior.spread, prior.name


@pytest.mark.parametrize(("family", "target"), [("iteration", 0.08), ("dense", 0.12), ("MoE", 0.20)])
def test_left_out_models_are_predicted_within_the_target(found: Validation, family: str, target: float) -> None:
    assert found.mean_error(family, left_out=True) <= target
    assert found.mean_error(family, left_out=False) <= found.mean_error(family, left_out=True) + 0.005


def test_faster_strategy_is_predicted_faster(found: Validation) -> None:
    assert found.pairs >= 5
    assert found.ordered_pairs >= 0.8 * found.pairs


def test_every_published_row_is_compared(found: Validation) -> None:
    assert len(found.times) == len(published()["throughput"]) + len(published()["iteration_time"])
    assert len(found.memories) == 3 * len(published()["memory"]) + 4 * len(published()["memory_ratio"])


def test_memory_figures_agree(found: Validation) -> None:
    for row in found.memories:
        limit = 2.0 if row.unit == "%" else 0.01 if "weights" in row.quantity else 0.05
        assert abs(row.difference) <= limit, row


def test_memfine_table_is_reproduced(found: Validation) -> None:
    assert len(found.memfine) == 6
    assert all(ours == theirs for _, ours, theirs in found.memfine)


def test_effective_training_time_is_consistent_with_the_published_one(found: Validation) -> None:
    assert 0.90 < found.faults.effective < 0.98


def test_report_prints_both_errors(found: Validation) -> None:
    text = str(found)
    assert "fitted and with the row's model left out" in text
    assert "contradicts itself: not fitted" in text


def test_runs_of_a_file_are_predicted_without_a_fit(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"throughput": [published()["throughput"][0]]}))
    (row,) = check_runs(load_runs(path))
    assert row.left_out is None
    assert "mean absolute error, dense" in runs_table([row])


def test_runs_file_brings_its_own_models_and_systems(tmp_path: Path) -> None:
    sizes = {"layers": 4, "hidden": 512, "ffn": 1024, "heads": 8, "kv_heads": 8, "head_dim": 64, "vocab": 1000}
    fields = {"gpu": "toy", "generation": "hopper", "tflops": {"BF16": 100}, "memory_gib": 16, "memory_gb_per_s": 1000}
    links = {"nvlink_domain": 8, "nvlink_gb_per_s": 100, "network_gb_per_s": 10, "host_link_gb_per_s": 20}
    row = published()["throughput"][0] | {"model": "tiny", "system": "Toy", "precision": "BF16", "settings": {}}
    row |= {"tokens_per_s_per_gpu": 1e6, "blind_tokens_per_s_per_gpu": 5e5, "peak_gib": 3.5}
    path = tmp_path / "runs.json"
    path.write_text(
        json.dumps({"architectures": {"tiny": sizes}, "systems": {"Toy": fields | links}, "throughput": [row]})
    )
    (found,) = check_runs(load_runs(path))
    assert found.run.name == "tiny Toy BF16"
    assert found.blind_error == -0.5
    assert "(measured 3.5)" in runs_table([found]) and "at first sight: 50.0% of 1 runs" in runs_table([found])
    path.write_text(json.dumps({"systems": {"Toy": fields}}))
    with pytest.raises(ConfigError, match=r"Toy\.nvlink_domain: Field required"):
        load_runs(path)


@pytest.mark.parametrize(
    ("name", "family", "limit"),
    [("held_out", "dense", 0.10), ("blind", "dense", 0.12), ("held_out", "MoE", 0.08), ("blind", "MoE", 0.09)],
)
def test_runs_outside_the_fit_stay_predicted(name: str, family: str, limit: float) -> None:
    rows = [row for row in check_runs(outside_runs()[name]) if row.run.family == family and row.run.calibrates]
    assert sum(abs(row.error) for row in rows) / len(rows) <= limit


def test_measured_peaks_are_near_the_predicted_ones() -> None:
    rows = [row for row in check_runs(outside_runs()["blind"]) if row.run.peak_gib]
    near = [abs(row.peak / 2**30 / row.run.peak_gib - 1) < 0.08 for row in rows if row.run.peak_gib]
    assert len(near) == 5 and sum(near) >= 4


def test_experts_outside_the_fit_are_predicted_within_a_tenth_with_the_run_that_contradicts_itself() -> None:
    runs = [run for found in outside_runs().values() for run in found if run.family == "MoE"]
    errors = [abs(row.error) for row in check_runs(runs)]
    assert len(errors) == 28
    assert sum(errors) / len(errors) <= 0.10
