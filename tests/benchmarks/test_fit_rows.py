"""Rows of `fit` against real steps, and the page of known models."""

from __future__ import annotations

import json

import pytest

from benchmarks import fit_accuracy, models_page
from benchmarks.known_models import KNOWN_MODELS


def test_a_summary_counts_what_is_near_and_what_is_under() -> None:
    rows = [{"ratio": one} for one in (0.985, 0.995, 1.0, 1.019, 1.05)] + [{"error": "refused"}]
    assert fit_accuracy.summary(rows) == (
        "5 compared, 4 within 2%, 1 more than 1% under; ratio 0.9850 to 1.0500, median 1.0000; 1 failed"
    )


def test_setups_have_names_of_their_own() -> None:
    names = [one.name for one in fit_accuracy.SETUPS]
    assert len(set(names)) == len(names)


def test_committed_rows_are_of_known_families_and_setups() -> None:
    setups = {one.name for one in fit_accuracy.SETUPS}
    rows = [json.loads(line) for line in fit_accuracy.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert {row["family"] for row in rows} <= set(fit_accuracy.FAMILIES)
    assert {row["setup"] for row in rows} <= setups
    for row in rows:
        assert "error" in row or row["ratio"] == round(row["said_bytes"] / row["measured_bytes"], 5)


def test_the_page_of_models_is_that_of_its_rows() -> None:
    lines = models_page.RESULTS.read_text(encoding="utf-8").splitlines()
    page = (models_page.ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == models_page.page([json.loads(line) for line in lines])


def test_a_page_shows_a_dash_where_nothing_fits() -> None:
    row = {"model": "OLMoE-1B-7B", "train": "full", "parameter_bytes": 14 * 10**9}
    row |= {"with": dict.fromkeys(map(str, models_page.MEMORIES), 0)}
    row |= {"without": dict.fromkeys(map(str, models_page.MEMORIES), 4096)}
    assert models_page.page([row]).endswith("| OLMoE-1B-7B | 14.0 GB | full |" + " - / 4,096 |" * 5 + "\n")


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_known_model_has_a_config(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model_type, fields = KNOWN_MODELS[name]
    config = transformers.CONFIG_MAPPING[model_type]
    left_to_checkpoints = {"head_dim"}  # models read it, and some configs have no default of it
    assert set(fields) <= {*vars(config()), *config.attribute_map, *left_to_checkpoints}
