"""Dry runs of models for a GPU: what is recorded is what the page shows, and what the kernels promise."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.gpu_dry.table import FILE, PAGE, RUNS, filled

RECORDED: list[dict[str, Any]] = json.loads(FILE.read_text())


def test_the_page_shows_what_is_recorded() -> None:
    text = PAGE.read_text()
    assert text.count("<!-- gpu-dry -->") == 1
    assert filled(text, RECORDED) == text


def test_every_layer_of_every_model_is_one_region_that_waits_for_nothing() -> None:
    assert [row["model"] for row in RECORDED] == [run.name for run in RUNS]
    for row, run in zip(RECORDED, RUNS, strict=True):
        assert (row["graph_breaks"], row["regions"], row["waits"]) == (0, run.layers, []), row


def test_heads_of_large_vocabularies_are_chunked_and_their_code_runs() -> None:
    chunks = {row["model"]: row["of_head"] for row in RECORDED}
    assert chunks["Qwen3-30B-A3B"] == 8  # 8192 tokens


def test_launches_of_a_layer_follow_from_its_windows_and_not_from_its_experts() -> None:
    """Two adapters take ten more a window: narrow rows twice, four times in backward, and four gradients."""
    for row, run in zip(RECORDED, RUNS, strict=True):
        assert sum(row["of_regions"].values()) <= 14 + (12 if run.rank else 2) * row["windows"], row
        assert ("narrow_kernel" in row["of_regions"]) is bool(run.rank)
