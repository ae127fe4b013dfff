"""Every kernel compiled for every target: the recorded table holds what it must, and is what comes out today."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks.gpu_kernels import CASES, HEAD, RESULTS, ROOT, TABLES, TARGETS, filled

RECORDED: dict[str, Any] = json.loads(RESULTS.read_text())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_case_is_recorded_for_the_target(target: Any) -> None:
    rows = [row for row in RECORDED["rows"] if row["target"] == target.name]
    assert {row["case"] for row in rows} == {HEAD, *(case.name for case in CASES)}
    kernels = {row["step"].split(",")[0] for row in rows}
    assert kernels == {
        "count", "scan", "offsets", "place", "gate_up", "down", "combine", "down_backward", "weight_gradient", "narrow",
        "cross_entropy",
    }  # fmt: skip


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_recorded_kernels_fit_the_target(target: Any) -> None:
    for row in (*RECORDED["rows"], *RECORDED["timed"]):
        if row["target"] == target.name:
            assert row["spilled_bytes"] == 0, row
            assert row["shared_bytes"] <= target.shared_limit, row
            assert bool(row["tensor_core"]) is row["products"], row


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_all_tiles_that_are_timed_are_recorded(target: Any) -> None:
    from memfine_fx.kernels.tiling import candidates

    for name in ("gate_up", "down", "down_backward", "weight_gradient"):
        expected = {
            (f"{one.rows}x{one.columns}x{one.depth}", one.by_descriptor, one.num_warps, one.num_stages)
            for one in candidates(target.name, torch.bfloat16, name)[1:]
        }
        rows = [row for row in RECORDED["timed"] if row["target"] == target.name and row["step"].split(",")[0] == name]
        told = ("tile", "by_descriptor", "num_warps", "num_stages")
        assert {tuple(row[name] for name in told) for row in rows} == expected
        assert {"Qwen3-30B-A3B", "GPT-OSS-120B"} <= {row["case"] for row in rows}


def test_the_page_shows_what_is_recorded() -> None:
    text = TABLES.read_text()
    assert text.count("<!-- table: Qwen3-30B-A3B -->") == 1
    assert "| down backward, writes activated | 64x64x64" in text
    assert filled(text, RECORDED) == text


def test_the_table_is_what_is_compiled_today() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed here: make gpu-kernels")
    version = importlib.metadata.version("triton")
    if version != RECORDED["triton"]:
        pytest.skip(f"the table was recorded with Triton {RECORDED['triton']}, not {version}: make gpu-kernels")
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--check"]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
