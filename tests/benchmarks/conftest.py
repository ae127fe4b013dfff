"""The machine's matrix rate is not what these tests are about: a small product stands in for the large one."""

import pytest

from benchmarks import machine


@pytest.fixture(autouse=True)
def small_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MATMUL_SIZE", {"cpu": 64, "cuda": 64})
