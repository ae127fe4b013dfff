"""Which machine this is, and how fast it multiplies matrices."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.records import Machine
from memfine_fx.memory.machine import cpu_model

_MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
_MATMUL_REPEATS = 5


def describe_machine(device: torch.device) -> Machine:
    return Machine(
        processor=cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=version_of("transformers"),
    )


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of one large ``torch.mm`` on random data: the median of a few, after one warm-up."""
    size = _MATMUL_SIZE[device.type]
    left = torch.randn(size, size, dtype=dtype, device=device)
    right = torch.randn(size, size, dtype=dtype, device=device)
    out = torch.empty_like(left)
    seconds = [seconds_of(lambda: torch.mm(left, right, out=out), device) for _ in range(1 + _MATMUL_REPEATS)]
    return float(2 * size**3 / statistics.median(seconds[1:]))


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """By the wall clock, of a call and of all that it leaves the device to do."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
