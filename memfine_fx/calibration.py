"""Rates of this device, measured once in a fraction of a second and kept on disk.

Matrix products of four row counts, a copy, and a small operation, each the best of a few runs: what others do on the
machine only slows things down. The file is found by what the rates depend on: device, dtype, threads, torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from memfine_fx.compat.autograd import run_without_modes
from memfine_fx.config import cache_folder
from memfine_fx.cost import DeviceRates

__all__ = ["device_rates"]

_ROWS = (32, 128, 512, 2048)
_INNER, _WIDTH = 512, 1024
_COPIED_BYTES = 1 << 25
_LIMIT_S, _FEWEST = 0.08, 5  # a measurement is repeated for so long, and at least so often


@functools.lru_cache(maxsize=16)
def device_rates(device_type: str, dtype: torch.dtype) -> DeviceRates:
    """The rates of this machine's device, from the file where they were measured before."""
    path = Path(cache_folder()) / f"rates_{_key(device_type, dtype)}.json"
    found = _read(path)
    if found is None:
        # NOTE: rates are first asked for inside a compilation, whose fake tensors would take no time at all.
        found = run_without_modes(partial(_measure, torch.device(device_type), dtype))
        _write(path, found)
    return found


def _key(device_type: str, dtype: torch.dtype) -> str:
    device = torch.cuda.get_device_name() if device_type == "cuda" else f"{platform.processor()} {os.cpu_count()}"
    parts = (device_type, device, str(dtype), torch.get_num_threads(), torch.__version__, _ROWS, _INNER, _WIDTH)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _measure(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    with torch.no_grad():
        matrix = torch.ones(_INNER, _WIDTH, dtype=dtype, device=device)
        products, fastest = [], 0.0
        for rows in _ROWS:
            left = torch.ones(rows, _INNER, dtype=dtype, device=device)
            rate = 2.0 * rows * _INNER * _WIDTH / _best(partial(torch.mm, left, matrix), device)
            fastest = max(fastest, rate)  # a larger product is no slower than a smaller one, whoever else was running
            products.append((rows, fastest))
        source = torch.ones(_COPIED_BYTES // dtype.itemsize, dtype=dtype, device=device)
        target = torch.empty_like(source)
        copy_bytes = 2.0 * _COPIED_BYTES / _best(lambda: target.copy_(source), device)
        small = torch.ones(8, dtype=dtype, device=device)
        return DeviceRates(tuple(products), copy_bytes, _best(lambda: small + small, device))


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several runs."""
    run()
    best, spent, count = float("inf"), 0.0, 0
    while spent < _LIMIT_S or count < _FEWEST:
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        best, spent, count = min(best, seconds), spent + seconds, count + 1
    return max(best, 1e-9)


def _read(path: Path) -> DeviceRates | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        products = tuple((int(rows), float(rate)) for rows, rate in fields["matmul_flops"])
        return DeviceRates(products, float(fields["copy_bytes"]), float(fields["launch_seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, rates: DeviceRates) -> None:
    """Whole or not at all; where nothing may be written, rates are measured again next time."""
    text = json.dumps(
        {
            "matmul_flops": [list(product) for product in rates.matmul_flops],
            "copy_bytes": rates.copy_bytes,
            "launch_seconds": rates.launch_seconds,
        }
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        return
