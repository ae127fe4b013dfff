"""Run one job in this fresh process: ``python -m benchmarks.worker JOB_AS_JSON`` prints one JSON line.

1. Build the workload; two warm-up steps compile it and make the gradients.
2. Time the steps; gradients are zeroed in place outside the clock.
3. Trace one step's bytes onto existing gradients, and one that makes them.
4. Sum up loss or output and gradients; measure what the machine's matrix product does.
5. Under a compiler, run the model in further shapes and count what is compiled again.

Errors are not caught: the harness reads them from standard error.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from benchmarks.machine import describe_machine, matmul_rate, synchronize
from benchmarks.peers import PEERS_OF
from benchmarks.records import Job, Measurement, Row
from benchmarks.workloads import Workload, build_workload
from memfine_fx.memory.measure import trace_memory

_WARM_UP_STEPS = 2


def measure(job: Job) -> Measurement:
    device = torch.device(job.device)
    cold = _is_cache_empty()
    workload = build_workload(job)
    warm_up = [_time_step(workload, device) for _ in range(_WARM_UP_STEPS)]
    graphs = counters["stats"]["unique_graphs"]
    seconds = tuple(_time_step(workload, device) for _ in range(job.steps))
    bytes_ = _count_bytes(workload, device)
    value = workload.value_of(workload.step())  # onto the zeroed gradients that _count_bytes left
    return Measurement(
        step_seconds=seconds,
        compile_seconds=max(0.0, sum(warm_up) - len(warm_up) * statistics.median(seconds)),
        cold=cold,
        peak_bytes=bytes_.peak,
        accumulating_peak_bytes=bytes_.accumulating_peak,
        resting_bytes=bytes_.resting,
        allocated_bytes=bytes_.allocated,
        reserved_bytes=bytes_.reserved,
        value=value,
        gradient_norm=workload.gradient_norm(),
        gradient_checksum=workload.gradient_checksum(),
        gradient_error=workload.gradient_error() if workload.gradient_error else None,
        matmul_flops_per_second=matmul_rate(getattr(torch, job.dtype), device),
        graphs=graphs,
        recompilations=_count_recompilations(job, workload),
    )


@dataclass(frozen=True)
class _Bytes:
    peak: int
    accumulating_peak: int
    resting: int
    allocated: int | None
    reserved: int | None


def _count_bytes(workload: Workload, device: torch.device) -> _Bytes:
    is_cuda = device.type == "cuda"
    workload.zero_gradients()
    if is_cuda:
        torch.cuda.empty_cache()
    accumulating = trace_memory(workload.step, device)
    allocated = torch.cuda.max_memory_allocated(device) if is_cuda else None
    reserved = torch.cuda.max_memory_reserved(device) if is_cuda else None
    workload.drop_gradients()
    fresh = trace_memory(workload.step, device, beyond=workload.gradients)
    workload.zero_gradients()
    return _Bytes(
        peak=fresh.peak_bytes,
        accumulating_peak=accumulating.peak_bytes,
        resting=fresh.resting_bytes,
        allocated=allocated,
        reserved=reserved,
    )


def _time_step(workload: Workload, device: torch.device) -> float:
    workload.zero_gradients()
    synchronize(device)
    started = time.perf_counter()
    workload.step()
    synchronize(device)
    return time.perf_counter() - started


def _count_recompilations(job: Job, workload: Workload) -> int | None:
    """Graphs that Dynamo captures anew in five further (batch, sequence) shapes."""
    if job.workload != "model" or not PEERS_OF[job.workload][job.peer].is_compiled:
        return None
    before = counters["stats"]["unique_graphs"]
    for batch, sequence in further_shapes(job.sizes.sequence):
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


def _is_cache_empty() -> bool:
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return cache is not None and not any(path.is_file() for path in Path(cache).rglob("*"))


def main(arguments: Sequence[str] | None = None) -> int:
    (job_text,) = sys.argv[1:] if arguments is None else arguments
    # Libraries write to file descriptor 1 as they please; give them standard error and keep the real one.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = Job.from_dict(json.loads(job_text))
    row = Row(job, round=0, measurement=measure(job), machine=describe_machine(torch.device(job.device)))
    print(row.to_json(), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
