"""Seconds of work: on a CPU one run at a time, on CUDA many between two events, over inputs that leave the cache."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from memfine_fx.memory import timing
from memfine_fx.memory.timing import copies_beyond_cache, seconds_of
from memfine_fx.plan import rates

CUDA = torch.device("cuda")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a stand-in for CUDA was told, in order; a millisecond passes between two events."""
    told: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 1.0

    monkeypatch.setattr(timing, "LIMIT_S", 0.0)
    monkeypatch.setattr(timing, "FEWEST", 1)
    for name, value in {
        "Event": Event,
        "device": lambda device: torch.device("cpu"),
        "synchronize": lambda: told.append("wait"),
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=50 << 20),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    return told


def test_a_cpu_is_asked_for_each_run_and_the_fastest_counts() -> None:
    seconds = seconds_of([lambda: time.sleep(0.02), lambda: time.sleep(0.001)], torch.device("cpu"))
    assert 0.001 <= seconds < 0.02


def test_on_cuda_nothing_waits_between_the_events_and_inputs_come_in_turn(done: list[str]) -> None:
    runs = [lambda name=name: done.append(name) for name in "abc"]
    assert seconds_of(runs, CUDA) == pytest.approx(1e-3 / 30)
    assert done[:3] == ["a", "b", "c"]  # once before, to be compiled
    assert done[3:] == ["wait", *"abc" * 10, "record", *"abc" * 10, "record", "wait"]


def test_what_launching_takes_is_not_hidden_behind_work(done: list[str]) -> None:
    assert seconds_of([lambda: done.append("a")], CUDA, is_ahead=False) == pytest.approx(1e-3 / 32)
    assert done == ["a", "wait", "record", *"a" * 32, "record", "wait"]


def test_inputs_are_twice_the_cache(done: list[str]) -> None:
    assert copies_beyond_cache(16 << 20, CUDA) == 7
    assert copies_beyond_cache(1 << 30, CUDA) == 1
    assert copies_beyond_cache(1, torch.device("cpu")) == 1


def test_rates_of_an_accelerator_are_of_products_that_leave_its_cache(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On meta tensors: nothing is computed."""
    products: list[tuple[int, tuple[int, ...]]] = []
    multiply = torch.mm

    def noted(left: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        products.append((id(matrix), tuple(left.shape)))
        return multiply(left, matrix)

    monkeypatch.setattr(torch, "mm", noted)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes, dtype, device: ones(*sizes, dtype=dtype, device="meta"))
    sizes = rates._CUDA_ROWS, rates._CUDA_INNER, rates._CUDA_WIDTH
    found = rates._measure(CUDA, torch.bfloat16, *sizes)
    matrices = {matrix for matrix, _ in products}
    assert len(matrices) * 2 * rates._CUDA_INNER * rates._CUDA_WIDTH >= 2 * (50 << 20)
    assert [rows for rows, _ in found.matmul_flops] == list(rates._CUDA_ROWS)
    rounds = 32 // len(matrices)
    expected = 2 * 8192 * rates._CUDA_INNER * rates._CUDA_WIDTH * rounds * len(matrices) / 1e-3
    assert found.matmul_flops[-1][1] == pytest.approx(expected)
    assert found.copy_bytes == pytest.approx(2 * 4 * (32 << 20) * 32 / 1e-3)
