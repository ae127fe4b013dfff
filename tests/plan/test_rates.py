"""Rates of the device: measured once, read from the file afterwards, whatever is compiling, and again where it is
damaged."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfine_fx.memory import timing
from memfine_fx.plan import rates
from memfine_fx.plan.cost import DeviceRates, Work, rows_seconds
from memfine_fx.plan.rates import device_rates, product_rates
from tests.damage import damaged_json


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "LIMIT_S", 0.0)
    monkeypatch.setattr(rates, "_LEAST_CPU_SHARE", 0.0)  # tests run beside others
    _forget()
    return tmp_path / "cache"


def _forget() -> None:
    device_rates.cache_clear()
    product_rates.cache_clear()


def test_rates_are_measured_once_and_kept(folder: Path) -> None:
    with FakeTensorMode():  # as inside a compilation, where products of fake tensors take no time
        rates = device_rates("cpu", torch.float32)
    assert all(1e6 < rate < 1e15 for _, rate in rates.matmul_flops)
    assert [rate for _, rate in rates.matmul_flops] == sorted(rate for _, rate in rates.matmul_flops)
    (file,) = folder.iterdir()
    device_rates.cache_clear()
    assert device_rates("cpu", torch.float32) == rates
    assert [file] == list(folder.iterdir())


MEASURED = DeviceRates(((32, 1e9), (128, 2e9), (512, 3e9), (2048, 3e9)), 1e10, 1e-6, 4e9)


def _is_usable(found: DeviceRates) -> bool:
    """Whether a plan can be made of them: every quotient is a number."""
    sizes: dict[str, Any] = dict(num_routed=1000, num_experts=8, flops_per_row=1e9, param_bytes=10**9, takes_group=True)
    seconds = [rows_seconds(found, rows=rows, **sizes) for rows in (1, 40, 4000)]
    seconds += [found.saving_seconds(1e9, 1e9), Work(1e12, 1e9, 100).seconds(found)]
    return all(0 < one < math.inf for one in seconds)


@pytest.mark.parametrize("read", ["device_rates", "product_rates"])
def test_damaged_rates_are_measured_again_and_written_anew(
    read: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "_measure", lambda *arguments: MEASURED)
    products = tuple((rows, float(rows)) for rows in rates._ROWS_OF_LAYERS)
    monkeypatch.setattr(rates, "_measure_products", lambda *arguments: products)

    def found() -> DeviceRates:
        _forget()
        if read == "device_rates":
            return device_rates("cpu", torch.float32)
        return product_rates("cpu", torch.float32, 48, 80)

    first = found()
    files = sorted(folder.iterdir())
    (file,) = [path for path in files if isinstance(json.loads(path.read_text()), list) == (read == "product_rates")]
    whole = file.read_text()
    for damage in damaged_json(whole):
        file.write_text(damage)
        again = found()
        assert _is_usable(again), damage
        if again == first:
            assert json.loads(file.read_text()) == json.loads(whole), damage
        else:  # other numbers, that a machine may have
            assert [rows for rows, _ in again.matmul_flops] == [rows for rows, _ in first.matmul_flops], damage
            assert all(1 <= rate <= 1e21 for _, rate in again.matmul_flops), damage
    assert sorted(folder.iterdir()) == files


def test_an_accelerator_has_no_rate_of_new_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file says so in JSON, and is read again."""
    products = tuple((rows, 1e12) for rows in rates._CUDA_ROWS)
    monkeypatch.setattr(rates, "_measure", lambda *arguments: DeviceRates(products, 1e12, 1e-6))
    monkeypatch.setattr(rates, "run_outside_compilation", lambda device_type, function: function())
    monkeypatch.setattr(rates, "measurement_key", lambda *parts: "here")
    first = device_rates("cuda", torch.bfloat16)
    monkeypatch.setattr(rates, "_measure", lambda *arguments: pytest.fail("measured again"))
    _forget()
    assert device_rates("cuda", torch.bfloat16) == first
    assert first.save_bytes == math.inf


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


@pytest.mark.parametrize("read", [device_rates, lambda *asked: product_rates(*asked, 48, 80)])
def test_rates_of_a_busy_machine_serve_this_process_alone(
    read: Callable[..., DeviceRates], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rates, "_LEAST_CPU_SHARE", 0.9)
    clock = iter(range(10**6))
    monkeypatch.setattr(timing, "thread_time", lambda: 0.5 * next(clock))  # half of the seconds that pass
    monkeypatch.setattr(timing, "perf_counter", lambda: float(next(clock)))
    with caplog.at_level("INFO", "memfine_fx"):
        found = read("cpu", torch.float32)
    assert read("cpu", torch.float32) is found
    assert not folder.exists()
    assert "the machine was busy" in caplog.text and "% of the time" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}


_FIRST_RUN = """
import pathlib, sys, time
import torch
from memfine_fx.memory import timing
from memfine_fx.plan import rates

timing.LIMIT_S, rates._LEAST_CPU_SHARE = 0.0, 0.0
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.001)
for number in range(20):
    rates.device_rates.cache_clear()
    rates.product_rates.cache_clear()
    assert rates.product_rates("cpu", torch.float32, 48 + 8 * number, 80).copy_bytes > 0
print(len(list(pathlib.Path(sys.argv[3]).iterdir())))
"""


def test_two_processes_at_their_first_run_share_the_folder(folder: Path, tmp_path: Path) -> None:
    """Both measure and write the same files at once."""
    ready = [tmp_path / "first", tmp_path / "second"]
    commands = [
        [sys.executable, "-W", "error", "-c", _FIRST_RUN, str(own), str(other), str(folder)]
        for own, other in zip(ready, reversed(ready), strict=True)
    ]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    told = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert all(not errors for _, errors in told), "nothing is logged"
    files = sorted(folder.iterdir())
    assert len(files) == 21 and {path.suffix for path in files} == {".json"}
    for path in files:
        assert json.loads(path.read_text())
