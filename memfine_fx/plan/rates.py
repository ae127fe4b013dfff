"""Rates of this device, measured once in a fraction of a second and kept on disk.

Matrix products of four row counts, a copy, and a small operation, each the best of a few runs: what others do on the
machine only slows things down. The file is found by what the rates depend on: device and its instructions, dtype,
threads, torch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from memfine_fx.memory.machine import keep_fields, kept_fields, measurement_key
from memfine_fx.memory.measure import run_outside_compilation
from memfine_fx.plan.cost import DeviceRates

__all__ = ["device_rates"]

_ROWS = (32, 128, 512, 2048)
_INNER, _WIDTH = 512, 1024
_COPIED_BYTES = 1 << 25
_LIMIT_S, _FEWEST = 0.08, 5  # a measurement is repeated for so long, and at least so often


@functools.lru_cache(maxsize=16)
def device_rates(device_type: str, dtype: torch.dtype) -> DeviceRates:
    """The rates of this machine's device, from the file where they were measured before."""
    name = f"rates_{measurement_key(device_type, str(dtype), _ROWS, _INNER, _WIDTH)}"
    found = _read(kept_fields(name))
    if found is None:
        found = run_outside_compilation(device_type, partial(_measure, torch.device(device_type), dtype))
        keep_fields(name, asdict(found))
    return found


def _measure(device: torch.device, dtype: torch.dtype) -> DeviceRates:
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


def _read(fields: Any) -> DeviceRates | None:
    try:
        products = tuple((int(rows), float(rate)) for rows, rate in fields["matmul_flops"])
        return DeviceRates(products, float(fields["copy_bytes"]), float(fields["launch_seconds"]))
    except (ValueError, KeyError, TypeError):
        return None
