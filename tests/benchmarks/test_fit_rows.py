"""Rows of `fit` against real steps, and the page of known models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fit_accuracy, models_page
from benchmarks.known_models import KNOWN_MODELS
from benchmarks.models_figure import draw


def test_a_summary_counts_what_is_near_and_what_is_under() -> None:
    ours, plain = "full fp32 2x256", "full fp32 2x256 as torch.compile takes it"
    rows = [{"setup": ours, "ratio": one} for one in (0.985, 0.995, 1.0, 1.019, 1.05)]
    rows += [{"setup": ours, "error": "refused"}]
    said = "5 compared, 4 within 2%, 1 more than 1% under; ratio 0.9850 to 1.0500, median 1.0000; 1 failed"
    assert fit_accuracy.summary(rows) == said
    assert fit_accuracy.summary([*rows, {"setup": plain, "ratio": 0.9}]) == (
        f"{said}\nas torch.compile takes it: "
        "1 compared, 0 within 2%, 1 more than 1% under; ratio 0.9000 to 0.9000, median 0.9000; 0 failed"
    )


def test_setups_have_names_of_their_own() -> None:
    names = [one.name for one in (*fit_accuracy.SETUPS, *fit_accuracy.HELD_SETUPS)]
    assert len(set(names)) == len(names)


def test_committed_rows_are_of_known_families_and_setups() -> None:
    setups = {one.name for one in (*fit_accuracy.SETUPS, *fit_accuracy.HELD_SETUPS)}
    rows = [json.loads(line) for line in fit_accuracy.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert {row["family"] for row in rows} <= {*fit_accuracy.FAMILIES, *fit_accuracy.HELD_FAMILIES}
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
    assert "\n| OLMoE-1B-7B | 14.0 GB | full |" + " - / 4,096 |" * 5 + "\n" in models_page.page([row])


def test_the_figure_is_drawn_of_rows_that_fit_somewhere(tmp_path: Path) -> None:
    about = {"model": "OLMoE-1B-7B", "train": "full", "codes": {}}
    nothing, something = (
        about | {way: dict.fromkeys(map(str, models_page.MEMORIES), seq) for way in ("with", "without")}
        for seq in (0, 100)
    )
    draw([nothing], tmp_path / "none.svg")
    draw([something], tmp_path / "one.svg")
    assert not (tmp_path / "none.svg").exists()
    assert "longest sequence, tokens" in (tmp_path / "one.svg").read_text(encoding="utf-8")


def test_a_page_takes_the_longer_of_a_budget_and_of_checkpointed_layers() -> None:
    """Lines of one row come one after another, each with the code that gave it."""
    memories = list(map(str, models_page.MEMORIES))
    about = {"model": "OLMoE-1B-7B", "train": "qlora", "parameter_bytes": 4 * 10**9}
    lines = [
        about | {"with": dict.fromkeys(memories, 100)},
        about | {"without": dict.fromkeys(memories, 50), "code": "abc"},
        about | {"with_checkpoints": dict.fromkeys(memories[:4], 90) | {memories[4]: 2000}, "code": "abc"},
    ]
    page = models_page.page(lines)
    assert "| QLoRA (NF4) |" + " 100 / 50 |" * 4 + " 2,000 c / 50 |\n" in page
    assert "The file has the commit of each answer: " in page and "abc" in page
    assert "Asked under a budget alone" not in page and "Asked under a budget alone" in models_page.page(lines[:2])


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_known_model_has_a_config(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model_type, fields = KNOWN_MODELS[name]
    config = transformers.CONFIG_MAPPING[model_type]
    left_to_checkpoints = {"head_dim"}  # models read it, and some configs have no default of it
    assert set(fields) <= {*vars(config()), *config.attribute_map, *left_to_checkpoints}
