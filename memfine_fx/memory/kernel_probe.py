"""Scratch memory of this machine's kernels beside their results: measured once by allocator events, saved on disk.

Another CPU, another torch or another oneDNN may take more than `kernel_scratch` counts. So attention forward and
backward, a weight's gradient and a product of rows run once at a few small shapes, under one profile, in the dtype that
a graph uses. What exceeds the count becomes an `Excess`, which is added to every count of that kernel in this process:

1. bytes for each byte of the inputs, where the excess grows with the number of heads at equal blocks;
2. a factor on the count, for what is left.
"""

from __future__ import annotations

import functools
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memfine_fx.compat.autograd import is_profiling
from memfine_fx.memory.machine import (
    DamagedFile,
    host_bytes,
    load_measurement,
    measurement_key,
    number_between,
    save_measurement,
)
from memfine_fx.memory.measure import MemoryTrace, mark, run_outside_compilation, trace_memory

__all__ = [
    "ATTENTION_SHAPES",
    "PRODUCT_SHAPES",
    "Excess",
    "Kernel",
    "Shape",
    "excess_of",
    "input_bytes",
    "measure",
    "measured_scratch",
    "shapes_of",
]

_LOG = logging.getLogger(__name__)

Kernel = Literal["forward", "backward", "gradient", "rows"]
"""Attention's, and products [a,R] @ [R,b] whose left factor lies column by column, and row by row."""

Shape = tuple[int, ...]
"""Of attention (heads a thread, queries, keys, head's width); of a product [a,R] @ [R,b] (a, b, R)."""

ATTENTION_SHAPES: tuple[Shape, ...] = (
    (1, 256, 256, 64), (4, 256, 256, 64), (1, 768, 512, 64), (1, 768, 256, 48), (1, 192, 520, 128), (1, 24, 40, 192),
    (1, 96, 321, 48),
)  # fmt: skip
"""A batch of one; the first two differ in nothing but heads, the others are one for each block of queries."""
PRODUCT_SHAPES: tuple[Shape, ...] = ((512, 256, 97), (192, 320, 539), (64, 64, 2048))

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class Excess:
    """A correction of the bytes counted for a kernel: `factor` times the count, plus `per_input_byte` for each byte of
    its inputs.

    `shape` is where the measured bytes exceeded the count most; None if they exceeded it nowhere.
    """

    factor: float = 1.0
    per_input_byte: float = 0.0
    shape: Shape | None = None


def shapes_of(kernel: Kernel) -> tuple[Shape, ...]:
    """Return the shapes at which a kernel is measured."""
    return ATTENTION_SHAPES if kernel in ("forward", "backward") else PRODUCT_SHAPES


def excess_of(
    measured: Sequence[int], counted: Sequence[int], inputs: Sequence[int], shapes: Sequence[Shape]
) -> Excess:
    """Return the least excess that covers every measurement.

    Args:
        measured, counted, inputs: bytes at each shape: measured, counted by the formula, of the kernel's inputs.
        shapes: of attention the first two differ in heads only, which shows growth.
    """
    excesses = [measured_bytes - counted_bytes for measured_bytes, counted_bytes in zip(measured, counted, strict=True)]
    if max(excesses) <= 0:
        return Excess()
    per_byte = max(
        _growth(excesses, inputs) if shapes[0][1:] == shapes[1][1:] else 0.0,
        *(
            measured_bytes / size
            for measured_bytes, counted_bytes, size in zip(measured, counted, inputs, strict=True)
            if not counted_bytes
        ),
        0.0,
    )
    factors = [
        (measured_bytes - per_byte * size) / counted_bytes
        for measured_bytes, counted_bytes, size in zip(measured, counted, inputs, strict=True)
        if counted_bytes
    ]
    return Excess(max(1.0, *factors, 1.0), per_byte, shapes[excesses.index(max(excesses))])


def _growth(beyond: Sequence[int], inputs: Sequence[int]) -> float:
    """Bytes by which the second excess is larger than the first, for each byte of inputs more."""
    return max(0.0, (beyond[1] - max(0, beyond[0])) / (inputs[1] - inputs[0]))


def measured_scratch(kernel: Kernel, dtype: torch.dtype) -> tuple[int, ...] | None:
    """Bytes at each shape on this machine, for the threads that run now; None where nothing can be measured now, or
    where the kernel does not run here at all.
    """
    return _measured(dtype, torch.get_num_threads()).get(kernel) or None


@functools.lru_cache(maxsize=16)
def _measured(dtype: torch.dtype, num_threads: int) -> dict[Kernel, tuple[int, ...]]:
    name = f"scratch_{measurement_key('cpu', str(dtype), ATTENTION_SHAPES, PRODUCT_SHAPES)}"
    measurement = load_measurement(name, _decode)
    if measurement is not None:
        return measurement
    if is_profiling():
        _LOG.info("kernels' scratch is not measured inside a profile; their formulas stand alone in this process")
        return {}
    measurement = measure(dtype)
    save_measurement(name, measurement)
    return measurement


def _decode(fields: Any) -> dict[Kernel, tuple[int, ...]]:
    """Decode a file of what `measure` returns: bytes at each shape of a kernel, none of attention that does not run."""
    return {
        "forward": _decode_sizes(fields["forward"], 0, len(ATTENTION_SHAPES)),
        "backward": _decode_sizes(fields["backward"], 0, len(ATTENTION_SHAPES)),
        "gradient": _decode_sizes(fields["gradient"], len(PRODUCT_SHAPES)),
        "rows": _decode_sizes(fields["rows"], len(PRODUCT_SHAPES)),
    }


def _decode_sizes(fields: Any, *lengths: int) -> tuple[int, ...]:
    if not isinstance(fields, list) or len(fields) not in lengths:
        raise DamagedFile(f"expected a list of {' or '.join(map(str, lengths))} byte counts, got {str(fields)[:200]}")
    for size in fields:
        if not number_between(size, 0, host_bytes()).is_integer():
            raise DamagedFile(f"expected a number of bytes, got {size}")
    return tuple(map(int, fields))


def measure(dtype: torch.dtype) -> dict[Kernel, tuple[int, ...]]:
    """Bytes beyond results of every kernel at every shape, now, on this machine's CPU; () of one that does not run."""
    return run_outside_compilation("cpu", functools.partial(_measure, dtype))


def _measure(dtype: torch.dtype) -> dict[Kernel, tuple[int, ...]]:
    calls = list(_calls(dtype))
    results: list[int] = []

    def step() -> None:
        for number, (_, call) in enumerate(calls):
            mark(str(number))
            results.append(_run(call))

    trace = trace_memory(step, torch.device("cpu"), collects_garbage=False)
    sizes_by_kernel: dict[Kernel, list[int]] = {"forward": [], "backward": [], "gradient": [], "rows": []}
    for (kernel, _), peak, num_bytes in zip(calls, _peaks(trace, len(calls)), results, strict=True):
        sizes_by_kernel[kernel].append(max(0, peak - num_bytes))
    return {kernel: tuple(sizes) for kernel, sizes in sizes_by_kernel.items()}


def _calls(dtype: torch.dtype) -> Iterator[tuple[Kernel, Callable[[], Any]]]:
    try:
        yield from list(_attention_calls(dtype))
    except RuntimeError as error:  # bf16 on a CPU with AMX that ATEN_CPU_CAPABILITY holds to less, and such a graph too
        _LOG.info("attention in %s does not run here: %s", dtype, error)
    for left, right, rows in PRODUCT_SHAPES:
        factors = torch.ones(left, rows, dtype=dtype), torch.ones(rows, right, dtype=dtype)
        yield "gradient", functools.partial(torch.mm, factors[0].t().contiguous().t(), factors[1])
        yield "rows", functools.partial(torch.mm, *factors)


def _attention_calls(dtype: torch.dtype) -> Iterator[tuple[Kernel, Callable[[], Any]]]:
    threads = torch.get_num_threads()
    for heads, queries, keys, width in ATTENTION_SHAPES:
        query, key = (
            torch.ones(1, length, heads * threads, width, dtype=dtype).transpose(1, 2) for length in (queries, keys)
        )
        out, sums = _FORWARD(query, key, key, 0.0, True)
        yield "forward", functools.partial(_FORWARD, query, key, key, 0.0, True)
        yield "backward", functools.partial(_BACKWARD, out, query, key, key, out, sums, 0.0, True)


def _run(call: Callable[[], Any]) -> int:
    """Run a call, drop its results and return their bytes."""
    returned = call()
    results = returned if isinstance(returned, tuple) else (returned,)
    return sum(tensor.untyped_storage().nbytes() for tensor in results)


def _peaks(trace: MemoryTrace, num_calls: int) -> Iterator[int]:
    """Live bytes of each call at most, beyond what was there when it was marked."""
    starts = dict(trace.marks)
    begins = [bisect_left(trace.times_us, starts[str(number)]) for number in range(num_calls)]
    for begin, end in zip(begins, [*begins[1:], len(trace.times_us)], strict=True):
        before = trace.live_bytes[begin - 1] if begin else 0
        yield max((live - before for live in trace.live_bytes[begin:end]), default=0)


def input_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes of queries, keys and values at a shape of attention, of both factors at a shape of a product."""
    if shape in PRODUCT_SHAPES:
        left, right, rows = shape
        return dtype.itemsize * rows * (left + right)
    heads, queries, keys, width = shape
    return dtype.itemsize * torch.get_num_threads() * math.prod((heads, width)) * (queries + 2 * keys)
