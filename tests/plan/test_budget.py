"""How many bytes a step may use, with and without a budget of the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfine_fx.config import Config
from memfine_fx.plan.budget import automatic_bytes, budget_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "own", "total", "expected"),
    [
        (80 * GIB, 0, 80 * GIB, 76 * GIB),  # alone on the device
        (30 * GIB, 20 * GIB, 80 * GIB, 46 * GIB),  # others hold 30 GiB
        (8 * GIB, 0, 8 * GIB, 7 * GIB),  # a small device: a twentieth would be too little
        (GIB // 2, 0, 80 * GIB, 0),  # others hold nearly all
    ],
)
def test_the_automatic_budget_is_what_others_leave_less_a_reserve(
    free: int, own: int, total: int, expected: int
) -> None:
    assert automatic_bytes(free, own, total) == expected


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(None, 46 * GIB), ("least", 46 * GIB), (0.5, 40 * GIB), ("20GiB", 20 * GIB), (5, 5)],
)
def test_an_accelerators_own_memory_bounds_what_has_no_budget(
    monkeypatch: pytest.MonkeyPatch, budget: Any, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    assert budget_bytes(Config(memory_budget=budget), torch.device("cuda")) == expected


@pytest.mark.parametrize("budget", [None, "least"])
def test_a_cpu_bounds_nothing_without_a_budget(budget: Any) -> None:
    assert budget_bytes(Config(memory_budget=budget), torch.device("cpu")) is None
