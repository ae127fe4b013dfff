"""What is measured of layers on a device, on small ones in the interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.gpu_kernels import Case
from benchmarks.measures import gpu_layers
from benchmarks.roofline import Shape
from tests.kernels.cases import DEVICE, in_kernels

# Launches are timed one by one, on memory that nothing was written to.
pytestmark = [*in_kernels, pytest.mark.filterwarnings("ignore:invalid value encountered")]


@pytest.mark.parametrize("is_clamped", (False, True))
def test_a_layer_has_a_row_for_every_plan_whose_results_are_the_grouped_layer_s(
    is_clamped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, which the interpreter multiplies as a device does."""
    monkeypatch.setattr(gpu_layers, "_REPEATS", 1)
    monkeypatch.setattr(gpu_layers, "_STEPS", 1)
    monkeypatch.setattr(gpu_layers, "_tiles", lambda layer, case, device: None)
    monkeypatch.setattr(torch, "compile", lambda module: module)
    made = Shape.case

    def in_fp32(shape: Shape, *args: Any, **options: Any) -> Case:
        return dataclasses.replace(made(shape, *args, **options), dtype="float32", table_dtype="float32")

    monkeypatch.setattr(Shape, "case", in_fp32)
    shape = Shape("small", 20, 2, 4, 32, 16, "nowhere", is_clamped=is_clamped)
    rows = list(gpu_layers.rows_of(shape, DEVICE))
    assert [row["plan"] for row in rows] == ["grouped", "grouped, compiled", *gpu_layers.PLANS]
    assert all(row["ms"] > 0 and row["peak_mb"] > 0 for row in rows)
    assert all(row["error"] < 1e-5 for row in rows[1:])
    (timed,) = (row["kernels"] for row in rows if "kernels" in row)
    assert len(timed) == 5 - (not is_clamped)  # the down projection has no bias in backward
    assert all(one["us"] > 0 and one["tflops"] > 0 for one in timed.values())
