"""Time against bytes of one model, everything in one process and interleaved: ``workload`` "front".

`Job.points` name what is compared: peers of the model workload, and "memfine@X" for a budget that lies X of the way
from the smallest feasible one to the peak of the step with nothing to spare (all that pays is kept). Each has its own
copy of the model with the same weights. After two warm-up steps each, rounds of one step each are timed, gradients
dropped before every step, and the peak of one more is counted.
"""

import statistics
import time
from dataclasses import dataclass, replace

import torch

from benchmarks.machine import matmul_rate
from benchmarks.measuring import is_cache_empty
from benchmarks.records import Job, Measurement
from benchmarks.workloads.base import Workload
from benchmarks.workloads.model import build_model_workload
from memfine_fx.compiler.session import sessions
from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.measure import trace_memory

OURS = "memfine@"


@dataclass(frozen=True)
class Entry:
    """One compiled variant.

    Args:
        workload: its step.
        budget: bytes of the whole step, 0 for peers.
        predicted: bytes of the whole step, 0 for peers.
        static: bytes there before the step.
        compile_seconds: first step.
        plan_seconds: of them, deciding what is kept.
        partition_seconds: of them, partitions beyond the one that a compilation without a budget makes.
    """

    workload: Workload
    budget: int
    predicted: int
    static: int
    compile_seconds: float
    plan_seconds: float = 0.0
    partition_seconds: float = 0.0


@dataclass(frozen=True)
class _Limits:
    """Smallest feasible budget, peak of a step that keeps all that pays, seconds of the cold compile with that."""

    least: int
    most: int
    cold_seconds: float

    def budget(self, share: float) -> int:
        return self.least + int(share * (self.most - self.least))


def measure_front(job: Job) -> Measurement:
    """Figures by point in `series`; the measurement itself is the last point's."""
    cold = is_cache_empty()
    device = torch.device(job.device)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    limits = _limits(job)
    entries = _entries(job, limits)
    seconds: dict[str, list[float]] = {name: [] for name in job.points}
    for _ in range(job.steps):
        for name, entry in entries.items():
            seconds[name].append(_timed(entry.workload))
    peaks = {name: _peak(entry.workload, device) for name, entry in entries.items()}
    expected = _sums(entries[job.points[0]].workload)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    static = max(entry.static for entry in entries.values())
    series = {
        "seconds": tuple(medians.values()),
        "peak_bytes": tuple(float(static + peak) for peak in peaks.values()),
        "budget_bytes": tuple(float(entry.budget) for entry in entries.values()),
        "predicted_bytes": tuple(float(entry.predicted) for entry in entries.values()),
        "compile_seconds": tuple(entry.compile_seconds for entry in entries.values()),
        "plan_seconds": tuple(entry.plan_seconds for entry in entries.values()),
        "partition_seconds": tuple(entry.partition_seconds for entry in entries.values()),
        "differs_by": tuple(_difference(entry.workload, expected) for entry in entries.values()),
    }
    last = entries[job.points[-1]].workload
    return Measurement(
        step_seconds=tuple(seconds[job.points[-1]]),
        compile_seconds=limits.cold_seconds,
        cold=cold,
        peak_bytes=peaks[job.points[-1]],
        accumulating_peak_bytes=None,
        resting_bytes=0,
        allocated_bytes=None,
        reserved_bytes=None,
        value=_sums(last)[0],
        gradient_norm=last.gradient_norm(),
        gradient_checksum=last.gradient_checksum(),
        gradient_error=None,
        matmul_flops_per_second=matmul_rate(getattr(torch, job.dtype), device),
        graphs=0,
        recompilations=None,
        series=series,
    )


def _entries(job: Job, limits: _Limits) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for name in job.points:
        if name.startswith(OURS):
            found[name] = _ours(job, limits.budget(float(name.removeprefix(OURS))))
        else:
            workload = build_model_workload(replace(job, workload="model", peer=name))
            found[name] = Entry(workload, 0, 0, 0, _warmed(workload))
    return found


def _limits(job: Job) -> _Limits:
    most = _ours(job)  # the first of the process: nothing is cached yet
    try:
        _ours(job, 1 << 20)
    except BudgetInfeasible as error:
        return _Limits(error.minimum_bytes, most.predicted, most.compile_seconds)
    raise AssertionError("a model trained in one MiB")


def _ours(job: Job, budget: int = 0) -> Entry:
    peer = f"memfine-{budget}B" if budget else "memfine-unlimited"
    workload = build_model_workload(replace(job, workload="model", peer=peer))
    seconds = _warmed(workload)
    session = sessions()[-1]
    step = session.report().step
    assert step is not None, "a compiled step has a prediction"
    static = step.static_bytes - dict(step.static)["gradients before the step"]
    spent = [session.stage_seconds.get(stage, 0.0) for stage in ("fit", "further partitions")]
    return Entry(workload, budget, static + step.peak.num_bytes, static, seconds, *spent)


def _warmed(workload: Workload) -> float:
    """Seconds of the first step."""
    first = _timed(workload)
    _timed(workload)
    return first


def _timed(workload: Workload) -> float:
    workload.drop_gradients()
    started = time.perf_counter()
    workload.step()
    return time.perf_counter() - started


def _peak(workload: Workload, device: torch.device) -> int:
    """Of a step, gradients that it makes included."""
    workload.drop_gradients()
    return trace_memory(workload.step, device).peak_bytes


def _sums(workload: Workload) -> tuple[float, float]:
    """(loss, norm of all gradients)."""
    workload.drop_gradients()
    return workload.value_of(workload.step()), workload.gradient_norm()


def _difference(workload: Workload, expected: tuple[float, float]) -> float:
    return max(abs(one / other - 1) for one, other in zip(_sums(workload), expected, strict=True))
