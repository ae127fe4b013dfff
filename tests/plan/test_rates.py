"""Rates of the device: measured once, read from the file afterwards, whatever is compiling."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfine_fx.memory import timing
from memfine_fx.plan.rates import device_rates, product_rates


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "LIMIT_S", 0.0)
    device_rates.cache_clear()
    product_rates.cache_clear()
    return tmp_path / "cache"


def test_rates_are_measured_once_and_kept(folder: Path) -> None:
    with FakeTensorMode():  # as inside a compilation, where products of fake tensors take no time
        rates = device_rates("cpu", torch.float32)
    assert all(1e6 < rate < 1e15 for _, rate in rates.matmul_flops)
    assert [rate for _, rate in rates.matmul_flops] == sorted(rate for _, rate in rates.matmul_flops)
    (file,) = folder.iterdir()
    device_rates.cache_clear()
    assert device_rates("cpu", torch.float32) == rates
    assert [file] == list(folder.iterdir())


def test_a_broken_file_is_measured_again(folder: Path) -> None:
    device_rates("cpu", torch.float32)
    (file,) = folder.iterdir()
    file.write_text("{}")
    device_rates.cache_clear()
    assert device_rates("cpu", torch.float32).copy_bytes > 0


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMFINE_CACHE", str(tmp_path / "file" / "below"))
    assert device_rates("cpu", torch.float32).launch_seconds > 0


def test_products_of_a_layers_widths_are_measured_once_and_kept(folder: Path) -> None:
    with FakeTensorMode():
        found = product_rates("cpu", torch.bfloat16, 48, 80)
    assert [rows for rows, _ in found.matmul_flops] == [64, 128, 256, 512, 1024, 2048]
    assert all(1e6 < rate < 1e15 for _, rate in found.matmul_flops)
    files = sorted(folder.iterdir())
    assert len(files) == 2
    product_rates.cache_clear()
    assert product_rates("cpu", torch.bfloat16, 48, 80) == found
    assert sorted(folder.iterdir()) == files
    assert product_rates("cpu", torch.bfloat16, 80, 48).copy_bytes == found.copy_bytes
    assert len(list(folder.iterdir())) == 3
