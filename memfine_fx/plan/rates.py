"""Rates of this device, measured once in a fraction of a second and kept on disk.

Matrix products of a few row counts, a copy, new memory that is written and read, and a small operation, each timed by
`memory.timing`. An accelerator's products are larger and take several matrices in turn, which L2 does not hold
together: the weights of a step's layers come from memory too. The file is found by what the rates depend on: device and
its instructions, dtype, threads, torch; and for a layer's own products, their widths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from memfine_fx.memory.machine import keep_fields, kept_fields, measurement_key
from memfine_fx.memory.measure import run_outside_compilation
from memfine_fx.memory.timing import copies_beyond_cache, seconds_of
from memfine_fx.plan.cost import DeviceRates

__all__ = ["device_rates", "product_rates"]

_ROWS = (32, 128, 512, 2048)
_ROWS_OF_LAYERS = (64, 128, 256, 512, 1024, 2048)
_WIDEST = 8192
_INNER, _WIDTH = 512, 1024
_COPIED_BYTES = 1 << 25
_NEW_BYTES = 1 << 26  # malloc keeps what is smaller than half of it for the next who asks, whose pages are there
_CUDA_ROWS = (128, 512, 2048, 8192)
_CUDA_INNER, _CUDA_WIDTH = 2048, 4096


@functools.lru_cache(maxsize=16)
def device_rates(device_type: str, dtype: torch.dtype) -> DeviceRates:
    """The rates of this machine's device, from the file where they were measured before."""
    sizes = (_CUDA_ROWS, _CUDA_INNER, _CUDA_WIDTH) if device_type == "cuda" else (_ROWS, _INNER, _WIDTH)
    name = f"rates_{measurement_key(device_type, str(dtype), *sizes)}"
    found = _read(kept_fields(name))
    if found is None:
        found = run_outside_compilation(device_type, partial(_measure, torch.device(device_type), dtype, *sizes))
        keep_fields(name, asdict(found))
    return found


@functools.lru_cache(maxsize=64)
def product_rates(device_type: str, dtype: torch.dtype, inner: int, width: int) -> DeviceRates:
    """The same rates with products [R,inner] @ [inner,width] in the place of general ones.

    Wider ones than `_WIDEST` are as fast, and are not measured.
    """
    inner, width = min(inner, _WIDEST), min(width, _WIDEST)
    others = device_rates(device_type, dtype)
    name = f"rates_{measurement_key(device_type, str(dtype), _ROWS_OF_LAYERS, inner, width)}"
    found = _read({**asdict(others), "matmul_flops": kept_fields(name)})
    if found is None:
        measure = partial(_measure_products, torch.device(device_type), dtype, _ROWS_OF_LAYERS, inner, width)
        found = replace(others, matmul_flops=run_outside_compilation(device_type, measure))
        keep_fields(name, found.matmul_flops)
    return found


def _measure_products(
    device: torch.device, dtype: torch.dtype, row_counts: Sequence[int], inner: int, width: int
) -> tuple[tuple[int, float], ...]:
    """FLOPs a second by rows."""
    num_matrices = copies_beyond_cache(inner * width * dtype.itemsize, device)
    matrices = [torch.ones(inner, width, dtype=dtype, device=device) for _ in range(num_matrices)]
    products, fastest = [], 0.0
    for rows in row_counts:
        left = torch.ones(rows, inner, dtype=dtype, device=device)
        seconds = seconds_of([partial(torch.mm, left, matrix) for matrix in matrices], device)
        fastest = max(fastest, 2.0 * rows * inner * width / seconds)  # a larger product is no slower than a smaller one
        products.append((rows, fastest))
    return tuple(products)


def _measure(
    device: torch.device, dtype: torch.dtype, row_counts: Sequence[int], inner: int, width: int
) -> DeviceRates:
    products = _measure_products(device, dtype, row_counts, inner, width)
    elements = copies_beyond_cache(_COPIED_BYTES, device) * _COPIED_BYTES // dtype.itemsize
    source = torch.ones(elements, dtype=dtype, device=device)
    target = torch.empty_like(source)
    copy_bytes = 2.0 * source.nbytes / seconds_of([lambda: target.copy_(source)], device)
    small = torch.ones(8, dtype=dtype, device=device)
    launch_seconds = seconds_of([lambda: small + small], device, is_ahead=False)
    if device.type != "cpu":
        return DeviceRates(products, copy_bytes, launch_seconds)
    kept = partial(torch.ones, _NEW_BYTES // 4, dtype=torch.float32)
    return DeviceRates(products, copy_bytes, launch_seconds, _NEW_BYTES / seconds_of([lambda: kept().sum()], device))


def _read(fields: Any) -> DeviceRates | None:
    try:
        products = tuple((int(rows), float(rate)) for rows, rate in fields["matmul_flops"])
        others = (float(fields[name]) for name in ("copy_bytes", "launch_seconds", "keep_bytes"))
        return DeviceRates(products, *others)
    except (ValueError, KeyError, TypeError):
        return None
