"""The figures of one workload under one peer, in this process.

1. Build the workload; two warm-up steps compile it.
2. Time the steps, each without gradients at its beginning; they are dropped outside the clock.
3. Trace one step's bytes onto existing gradients, and two that make them: beyond these, and with them.
4. Sum up loss or output and gradients; measure what the machine's matrix product does.
5. Under a compiler, run the model in further shapes and count what is compiled again.
"""

import os
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import memfine_fx
from benchmarks.machine import matmul_rate, seconds_of
from benchmarks.peers import find_peer
from benchmarks.records import Job, Measurement
from benchmarks.workloads import Workload
from benchmarks.workloads.adapted import WORKLOADS, build_adapted_workload
from benchmarks.workloads.layer import build_gradients_workload, build_layer_workload, build_rank_workload
from benchmarks.workloads.model import build_model_workload
from memfine_fx.memory.measure import MemoryTrace, trace_memory

BUILDERS = {
    **dict.fromkeys(WORKLOADS, build_adapted_workload),
    "layer": build_layer_workload,
    "gradients": build_gradients_workload,
    "model": build_model_workload,
    "rank": build_rank_workload,
}
_WARM_UP_STEPS = 2
_TIMELINE_POINTS = 240


def measure_step(job: Job) -> Measurement:
    device = torch.device(job.device)
    cold = is_cache_empty()
    graphs_before = counters["stats"]["unique_graphs"]
    workload = BUILDERS[job.kind](job)
    warm_up = [time_step(workload, device) for _ in range(_WARM_UP_STEPS)]
    graphs = int(counters["stats"]["unique_graphs"] - graphs_before)
    seconds = tuple(time_step(workload, device) for _ in range(job.steps))
    accumulating, allocated, reserved = _existing_gradients(workload, device)
    workload.drop_gradients()
    fresh = trace_memory(workload.step, device, beyond=workload.gradients)
    whole = peak_of(workload, device)
    return replace(
        summed_up(workload, job, seconds, fresh.peak_bytes),
        cold=cold,
        compile_seconds=max(0.0, sum(warm_up) - len(warm_up) * statistics.median(seconds)),
        accumulating_peak_bytes=accumulating,
        whole_peak_bytes=whole,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        graphs=graphs,
        largest_bytes=max(fresh.allocation_bytes, default=0),
        recompilations=_count_recompilations(job, workload),
        series={**workload.series, **timeline(fresh), **_peaks_of_parts(workload, device)},
    )


def summed_up(workload: Workload, job: Job, seconds: tuple[float, ...], peak_bytes: int) -> Measurement:
    """With the loss or output of one more step, sums of its gradients, and the machine's matrix product."""
    workload.drop_gradients()
    return Measurement(
        step_seconds=seconds,
        cold=False,
        peak_bytes=peak_bytes,
        value=workload.value_of(workload.step()),
        gradient_norm=workload.gradient_norm(),
        gradient_checksum=workload.gradient_checksum(),
        gradient_error=workload.gradient_error() if workload.gradient_error else None,
        matmul_flops_per_second=matmul_rate(getattr(torch, job.dtype), torch.device(job.device)),
    )


def _existing_gradients(workload: Workload, device: torch.device) -> tuple[int | None, int | None, int | None]:
    """(peak, allocated, reserved) of a step that adds to gradients; the latter two on CUDA only.

    No peak where a budget of ours does not allow for gradients that are there before the step.
    """
    is_cuda = device.type == "cuda"
    workload.zero_gradients()
    if is_cuda:
        torch.cuda.empty_cache()
    try:
        peak = trace_memory(workload.step, device).peak_bytes
    except memfine_fx.BudgetInfeasible:
        peak = None
    if not is_cuda:
        return peak, None, None
    return peak, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def timeline(trace: MemoryTrace) -> dict[str, tuple[float, ...]]:
    """Live bytes over the step in at most `_TIMELINE_POINTS` equal spans of time, each span's largest."""
    if not trace.times_us:
        return {}
    end = max(trace.times_us[-1], 1e-9)
    highest: dict[int, int] = {}
    for time_us, live in zip(trace.times_us, trace.live_bytes, strict=True):
        span = min(_TIMELINE_POINTS - 1, int(time_us / end * _TIMELINE_POINTS))
        highest[span] = max(highest.get(span, 0), live)
    times = tuple(round(span / _TIMELINE_POINTS * end / 1e3, 3) for span in highest)
    return {"time_ms": times, "live_bytes": tuple(float(live) for live in highest.values())}


def _peaks_of_parts(workload: Workload, device: torch.device) -> dict[str, tuple[float, ...]]:
    peaks = []
    for part in workload.parts:
        workload.drop_gradients()
        made = lambda: [leaf.grad for leaf in workload.leaves.values() if leaf.grad is not None]  # noqa: E731
        peaks.append(float(trace_memory(part, device, beyond=made).peak_bytes))
    return {"peak_bytes": tuple(peaks)} if peaks else {}


def time_step(workload: Workload, device: torch.device) -> float:
    """Seconds of a step that begins without gradients, as after an optimizer's `zero_grad()`."""
    workload.drop_gradients()
    return seconds_of(workload.step, device)


def peak_of(workload: Workload, device: torch.device) -> int:
    """Bytes of a step that makes its gradients, these included."""
    workload.drop_gradients()
    return trace_memory(workload.step, device).peak_bytes


def _count_recompilations(job: Job, workload: Workload) -> int | None:
    """Graphs that Dynamo captures anew in five further (batch, sequence) shapes."""
    if job.kind != "model" or not find_peer(job.workload, job.peer).is_compiled:
        return None
    before = counters["stats"]["unique_graphs"]
    for batch, sequence in further_shapes(job.sizes.sequence):
        workload.drop_gradients()
        workload.step_with_shape(batch, sequence)
    return int(counters["stats"]["unique_graphs"] - before)


def further_shapes(sequence: int) -> tuple[tuple[int, int], ...]:
    """None has a batch of one: Dynamo always compiles that size on its own, whatever the backend."""
    return (
        (2, sequence // 2),
        (3, sequence // 4),
        (4, sequence // 2 - 24),
        (5, sequence // 8),
        (2, sequence - 8),
    )


def is_cache_empty() -> bool:
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return cache is not None and not any(path.is_file() for path in Path(cache).rglob("*"))
