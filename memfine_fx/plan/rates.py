"""Rates of this device, measured once in a fraction of a second and saved on disk.

Matrix products of a few row counts, a copy, new memory that is written and read, and a small operation, each timed by
`memory.timing`. An accelerator's products are larger and take several matrices in turn, which L2 does not hold
together: the weights of a step's layers come from memory too. The file is found by what the rates depend on: device and
its instructions, dtype, threads, torch; and for a layer's own products, their widths.

The knee is how few rows a chunk may have at full speed by the rates of a layer's own products. A chunk of R rows takes
the products of its rows, at the rate that R rows reach; calls of operations; and what one more chunk of an expert adds
to the expert's gradient, in low precision through fp32 staging. The last two are shared by its rows. So time for each
row falls with R, and memory grows. Chosen is the smallest R that takes hardly more for each row than the best one does.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import torch

from memfine_fx.memory.machine import DamagedFile, load_measurement, measurement_key, number_between, save_measurement
from memfine_fx.memory.measure import run_outside_compilation
from memfine_fx.memory.region_bytes import RegionBytes
from memfine_fx.memory.timing import copies_beyond_cache, seconds_of, with_cpu_share
from memfine_fx.plan.cost import CALLS_PER_CHUNK, STEP_FLOPS, DeviceRates, Work

__all__ = ["CHOICES", "device_rates", "knee_rows", "measured_knee", "product_rates"]

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

_ROWS = (32, 128, 512, 2048)
_ROWS_OF_LAYERS = (64, 128, 256, 512, 1024, 2048)
_WIDEST = 8192
_INNER, _WIDTH = 512, 1024
_COPIED_BYTES = 1 << 25
_NEW_BYTES = 1 << 26  # malloc keeps what is smaller than half of it for the next who asks, whose pages are there
_CUDA_ROWS = (128, 512, 2048, 8192)
_CUDA_INNER, _CUDA_WIDTH = 2048, 4096
_RATES = (1.0, 1e21)
"""FLOPs or bytes a second that a file may name; the least seconds that `seconds_of` returns allow no more."""
_LAUNCH_SECONDS = (1e-9, 1.0)
_LEAST_CPU_SHARE = 0.9
"""Rates of a CPU are saved if the measuring thread had a CPU for at least this share of the time.

On 2 cores of an AMD EPYC (family 25, model 17), with 1 and 2 threads, the share was 0.96 to 1.00 in 72 runs on the idle
machine and 0.47 to 0.75 in 72 runs beside two busy loops. The spread of the repeats does not tell the two apart: a loop
that shares a core slows all repeats alike. Median over minimum was 1.01 to 1.22 in 70 idle runs and 1.01 to 1.87 in 94
runs beside the loops, mean over minimum 1.02 to 1.23 and 1.02 to 6.46.
"""


@functools.lru_cache(maxsize=16)
def device_rates(device_type: str, dtype: torch.dtype) -> DeviceRates:
    """Return the rates of this machine's device, from the file where they were measured before."""
    sizes = (_CUDA_ROWS, _CUDA_INNER, _CUDA_WIDTH) if device_type == "cuda" else (_ROWS, _INNER, _WIDTH)
    name = f"rates_{measurement_key(device_type, str(dtype), *sizes)}"
    rates = load_measurement(name, partial(_decode_rates, device_type, sizes[0]))
    if rates is None:
        rates = _measured(device_type, dtype, name, partial(_measure, torch.device(device_type), dtype, *sizes), asdict)
    return rates


@functools.lru_cache(maxsize=64)
def product_rates(device_type: str, dtype: torch.dtype, inner: int, width: int) -> DeviceRates:
    """Return the same rates with products [R,inner] @ [inner,width] in the place of general ones.

    Wider ones than `_WIDEST` are as fast, and are not measured.
    """
    inner, width = min(inner, _WIDEST), min(width, _WIDEST)
    others = device_rates(device_type, dtype)
    name = f"rates_{measurement_key(device_type, str(dtype), _ROWS_OF_LAYERS, inner, width)}"
    products = load_measurement(name, partial(_decode_products, _ROWS_OF_LAYERS))
    if products is None:
        measure = partial(_measure_products, torch.device(device_type), dtype, _ROWS_OF_LAYERS, inner, width)
        products = _measured(device_type, dtype, name, measure, list)
    return replace(others, matmul_flops=products)


def _measured(
    device_type: str,
    dtype: torch.dtype,
    name: str,
    measure: Callable[[], ResultT],
    fields_of: Callable[[ResultT], object],
) -> ResultT:
    """Measure now, and save the result unless the machine was busy."""
    result, share = run_outside_compilation(device_type, partial(with_cpu_share, measure))
    if device_type == "cpu" and share < _LEAST_CPU_SHARE:
        _LOG.info(
            "the machine was busy while rates in %s were measured: the measuring thread had a CPU for %.0f%% of the "
            "time, less than %.0f%%. These rates serve this process; the next process measures again",
            dtype, 100 * share, 100 * _LEAST_CPU_SHARE,
        )  # fmt: skip
    else:
        save_measurement(name, fields_of(result))
    return result


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
    allocate = partial(torch.ones, _NEW_BYTES // 4, dtype=torch.float32)
    return DeviceRates(
        products, copy_bytes, launch_seconds, _NEW_BYTES / seconds_of([lambda: allocate().sum()], device)
    )


def _decode_rates(device_type: str, row_counts: Sequence[int], fields: Any) -> DeviceRates:
    """Decode a file of `device_rates`; only a CPU's has a rate of new memory."""
    return DeviceRates(
        _decode_products(row_counts, fields["matmul_flops"]),
        number_between(fields["copy_bytes"], *_RATES),
        number_between(fields["launch_seconds"], *_LAUNCH_SECONDS),
        number_between(fields["save_bytes"], *_RATES) if device_type == "cpu" else math.inf,
    )


def _decode_products(row_counts: Sequence[int], fields: Any) -> tuple[tuple[int, float], ...]:
    """Decode (rows, FLOPs a second) of exactly these row counts; `_measure_products` gives no larger one less."""
    rows, rates = zip(*((rows, number_between(rate, *_RATES)) for rows, rate in fields), strict=True)
    if list(rows) != list(row_counts) or list(rates) != sorted(rates):
        raise DamagedFile(f"expected rising rates of products with {list(row_counts)} rows, got {str(fields)[:200]}")
    return tuple(zip(row_counts, rates, strict=True))


CHOICES = (64, 128, 256, 512, 1024, 2048)
_WORST = 1.01
"""Seconds a row that the choice may take, beside the best."""
_STAGED = 3
"""Times that fp32 staging is read or written for one more product: it is read, added to, and at last cast."""


def knee_rows(rates: DeviceRates, region: RegionBytes) -> int:
    """The smallest number of rows within 1% of the best time for each row.

    Args:
        rates: of products of the region's widths.
        region: its sizes.
    """
    seconds = {rows: _seconds(rates, region, rows) / rows for rows in CHOICES}
    return next(rows for rows in CHOICES if seconds[rows] <= _WORST * min(seconds.values()))


def _seconds(rates: DeviceRates, region: RegionBytes, rows: int) -> float:
    """Return the seconds of one of several chunks of an expert, forward and backward."""
    gradients = region.param_bytes / max(1, region.num_experts)
    moved = 2 * gradients if not region.staging_bytes else _STAGED * region.staging_bytes + 2 * gradients
    work = Work(STEP_FLOPS * region.flops_per_row * rows, moved, CALLS_PER_CHUNK)
    return work.seconds(rates, rows)


def measured_knee(region: RegionBytes, dtype: torch.dtype) -> int | None:
    """The knee of a layer on this machine's CPU, measured once for its widths; None where others decide: on other
    devices, and where rows come from other ranks or the experts of a chunk are multiplied at once.
    """
    if region.device_type != "cpu" or region.all_to_all is not None or region.takes_group or not region.flops_per_row:
        return None
    width = max(1, region.flops_per_row // (2 * region.hidden))
    return knee_rows(product_rates(region.device_type, dtype, region.hidden, width), region)
