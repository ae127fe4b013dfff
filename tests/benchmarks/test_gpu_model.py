"""A model's step in several ways: the page shows the committed rows, and processes measure or say why they failed."""

from __future__ import annotations

import json

import pytest

from benchmarks.measures import gpu_model
from benchmarks.measures.gpu_model import PAGE, WAYS, Sizes, Way


def test_the_page_shows_what_was_measured_of_models() -> None:
    text = PAGE.read_text()
    assert text.count("<!-- gpu-model -->") == 1
    assert gpu_model.filled(text, json.loads(gpu_model.FILE.read_text())) == text


def test_recorded_steps_keep_within_their_predictions_and_near_fp32() -> None:
    for session in json.loads(gpu_model.FILE.read_text()):
        rows = {row["way"]: row for row in session["rows"]}
        reference = rows.get("eager", rows["compile"])
        for row in rows.values():
            # Under autocast 1 to 2 MB of 8 GB were more than predicted, for which docs/gpu.md has no reason.
            assert row["peak_gb"] <= 1.0005 * row.get("predicted_gb", float("inf"))
            assert row["worst_gradient_error"] <= 1.25 * reference["worst_gradient_error"]
            assert row["median_gradient_error"] <= 1.25 * reference["median_gradient_error"]


@pytest.mark.slow
@pytest.mark.parametrize("is_autocast", (False, True))
def test_a_way_is_measured_in_a_process_of_its_own_and_a_failure_is_told(
    is_autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sizes = Sizes(layers=1, sequence=64, is_autocast=is_autocast, is_small=True)
    ways = [WAYS["eager"], WAYS["memfine, bodies"], Way("unknown", "memfine", budget="nonsense")]
    eager, ours, failed = gpu_model.rows_of(sizes, ways)
    assert eager["ms"] > 0
    assert 0 < eager["median_gradient_error"] < 0.1
    assert ours["peak_gb"] <= ours["predicted_gb"]
    assert ours["median_gradient_error"] <= 1.25 * eager["median_gradient_error"]
    assert "nonsense" in failed["failed"][-1]
