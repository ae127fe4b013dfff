"""Bytes of a layer's step: those counted on fake tensors are those that real ones take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu_kernels import Case, Step
from benchmarks.gpu_peaks import bytes_of_kernels
from memfine_fx.kernels.launches import skipping
from memfine_fx.memory.measure import trace_memory
from tests.kernels.cases import in_kernels

pytestmark = in_kernels


@pytest.mark.parametrize("options", [{}, {"saves_products": True}, {"is_deterministic": True}], ids=str)
@pytest.mark.parametrize("rows_per_window", (48, 128))
def test_fake_steps_hold_what_real_ones_do(rows_per_window: int, options: dict[str, Any]) -> None:
    case = Case("small", 64, 2, 4, 32, 48, rows_per_window, **options)
    step, results = Step(case, "sm_90"), []

    def run() -> None:
        out = step.forward()
        results.extend([out, *step.backward(out)])

    with skipping():
        measured = trace_memory(run, torch.device("cpu"), beyond=lambda: results)
    assert bytes_of_kernels(case, "sm_90").peak == measured.peak_bytes
