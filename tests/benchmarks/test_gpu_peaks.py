"""What a step holds, counted on fake tensors: what is alive at once, and what of it is left out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from benchmarks.gpu_kernels import Case
from benchmarks.gpu_peaks import StepBytes, bytes_of_grouped, bytes_of_step


def test_what_a_step_ends_with_and_what_was_there_is_not_counted() -> None:
    with FakeTensorMode():
        tokens, kept = torch.empty(100), []

        def forward() -> Tensor:
            kept.append(tokens.view(10, 10).sum(0))  # 40 bytes until backward
            return tokens * 2 + 1  # 400 bytes at once, and the output

        def backward(out: Tensor) -> list[Tensor]:
            return [(out * tokens + out) * 2]  # two of 400 at once, and the gradient

        assert bytes_of_step([tokens], forward, backward) == StepBytes(between=40, peak=840)


def test_a_step_that_makes_nothing_holds_nothing() -> None:
    with FakeTensorMode():
        tokens = torch.empty(100)
        assert bytes_of_step([tokens], lambda: tokens * 2, lambda out: [out * 2]) == StepBytes(0, 0)


def test_a_checkpoint_leaves_nothing_between_the_passes_of_the_grouped_layer() -> None:
    case = Case("small", tokens=64, top_k=2, experts=4, hidden=32, width=48, rows_per_window=128)
    found = bytes_of_grouped(case)
    rows, entry_bytes = 64 * 2, 2
    assert found.between == 0
    # At least rows, their products, and the gradient of one of both.
    assert found.peak > rows * (32 + 2 * 48 + 48) * entry_bytes
