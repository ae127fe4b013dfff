"""How many bytes a step may use, with and without a budget of the user."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memfine_fx.config import Config
from memfine_fx.plan.budget import automatic_bytes, budget_bytes, is_limited
from memfine_fx.plan.runs import RunHistory

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


def session_of(budget: Any, held: int = 0) -> Any:
    """What is asked of a session: its config, and how much it holds itself."""
    return SimpleNamespace(
        config=Config(memory_budget=budget),
        history=RunHistory(),
        runs_here=True,
        device_limits={},
        held_bytes=lambda: held,
    )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """80 GiB, of which others hold 30 and this process 20: 15 in tensors."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15 * GIB)
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(None, 45 * GIB), ("least", 45 * GIB), (0.5, 40 * GIB), ("20GiB", 20 * GIB), (5, 5)],
)
def test_an_accelerators_own_memory_bounds_what_has_no_budget(device: torch.device, budget: Any, expected: int) -> None:
    """46 GiB, rounded to a 64th of the device."""
    assert budget_bytes(session_of(budget, held=15 * GIB), device) == expected


def test_other_tensors_of_the_process_leave_less(device: torch.device) -> None:
    """A reference model, an average of the weights: nobody frees them for a step."""
    assert budget_bytes(session_of(None, held=5 * GIB), device) == 35 * GIB


def test_an_accelerator_is_asked_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of every step would differ otherwise."""
    session = session_of(None, held=15 * GIB)
    assert budget_bytes(session, device) == 45 * GIB
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 19 * GIB)
    assert budget_bytes(session, device) == 45 * GIB
    session.device_limits.clear()
    assert budget_bytes(session, device) == 41 * GIB + GIB // 4


@pytest.mark.parametrize(
    ("budget", "device_type", "runs_here", "expected"),
    [
        (None, "cuda", True, True),
        (None, "cuda", False, False),  # `fit` asks what a run would take, of any device
        (None, "cpu", True, False),
        ("least", "cuda", True, False),
        ("1GiB", "cpu", True, True),
    ],
)
def test_bytes_decide_where_there_is_a_budget_or_an_accelerator(
    budget: Any, device_type: str, runs_here: bool, expected: bool
) -> None:
    session = session_of(budget)
    session.runs_here = runs_here
    assert is_limited(session, torch.device(device_type), []) == expected


@pytest.mark.parametrize("budget", [None, "least"])
def test_a_cpu_bounds_nothing_without_a_budget(budget: Any) -> None:
    assert budget_bytes(session_of(budget), torch.device("cpu")) is None
