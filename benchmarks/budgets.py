"""Bytes in, plan out: time at every budget beside peers, and predicted against measured peaks of whole steps.

``workload`` "front": time against bytes of one model, everything in one process and interleaved. `Job.points` name what
is compared: peers of the model workload, and "memfine@X" for a budget that lies X of the way from the smallest feasible
one to the peak of the step with nothing to spare (all that pays is kept). Each has its own copy of the model with the
same weights. After two warm-up steps each, rounds of one step each are timed, gradients dropped before every step, and
the peak of one more is counted.

``workload`` "prediction:MODEL": MODEL is a transformers model type; its sizes come from the job. `Job.points` are
budgets in order: "free" is none, a number is that share of the bytes predicted without one, and "least" asks for far
too little. Where a budget is infeasible, the smallest one that the error names is taken instead, which must then work.
For each point the model is compiled anew, a step warms it up, and two are measured with the allocator's events: one
as it is, and one with routers set to zero, so that all tokens go to the same experts, as no step before did.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import memfine_fx
from benchmarks.machine import matmul_rate
from benchmarks.measuring import is_cache_empty, peak_of, summed_up, time_step
from benchmarks.records import Job, Measurement
from benchmarks.workloads import Workload
from benchmarks.workloads.model import build_architecture, build_model_workload
from memfine_fx.compiler.reporting import report_of
from memfine_fx.compiler.sessions import sessions
from memfine_fx.errors import BudgetInfeasible
from memfine_fx.memory.measure import trace_memory
from memfine_fx.plan.budget import SCALAR_BYTES

OURS = "memfine@"
NO_BUDGET = "free"
LEAST = "least"
_TOO_LITTLE = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One compiled variant of a front.

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


def measure_front(job: Job) -> Measurement:
    """Figures by point in `series`; the measurement itself is the last point's."""
    cold = is_cache_empty()
    device = torch.device(job.device)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    cold_seconds, entries = _entries(job)
    seconds: dict[str, list[float]] = {name: [] for name in job.points}
    for _ in range(job.steps):
        for name, entry in entries.items():
            seconds[name].append(time_step(entry.workload, device))
    peaks = [peak_of(entry.workload, device) for entry in entries.values()]
    sums = [_sums(entry.workload) for entry in entries.values()]
    static = max(entry.static for entry in entries.values())
    series = {
        "seconds": [statistics.median(found) for found in seconds.values()],
        "peak_bytes": [static + peak for peak in peaks],
        "budget_bytes": [entry.budget for entry in entries.values()],
        "predicted_bytes": [entry.predicted for entry in entries.values()],
        "compile_seconds": [entry.compile_seconds for entry in entries.values()],
        "plan_seconds": [entry.plan_seconds for entry in entries.values()],
        "partition_seconds": [entry.partition_seconds for entry in entries.values()],
        "differs_by": [max(abs(a / b - 1) for a, b in zip(found, sums[0], strict=True)) for found in sums],
    }
    last = job.points[-1]
    return replace(
        summed_up(entries[last].workload, job, tuple(seconds[last]), peaks[-1]),
        cold=cold,
        compile_seconds=cold_seconds,
        series=_floats(series),
    )


def _entries(job: Job) -> tuple[float, dict[str, Entry]]:
    """Seconds of the cold compile, and every point's entry."""
    most = _ours(job)  # the first of the process: nothing is cached yet
    try:
        _ours(job, _TOO_LITTLE)
    except BudgetInfeasible as error:
        least = error.minimum_bytes
    else:
        raise AssertionError(f"a model trained in {_TOO_LITTLE} bytes")
    found: dict[str, Entry] = {}
    for name in job.points:
        if name.startswith(OURS):
            # A budget also holds the scalars that autograd makes outside of graphs, which no prediction counts.
            spare = most.predicted + SCALAR_BYTES - least
            found[name] = _ours(job, least + int(float(name.removeprefix(OURS)) * spare))
        else:
            workload = build_model_workload(replace(job, workload="model", peer=name))
            found[name] = Entry(workload, 0, 0, 0, _warmed(workload, job))
    return most.compile_seconds, found


def _ours(job: Job, budget: int = 0) -> Entry:
    peer = f"memfine-{budget}B" if budget else "memfine-unlimited"
    workload = build_model_workload(replace(job, workload="model", peer=peer))
    seconds = _warmed(workload, job)
    session = sessions()[-1]
    static, predicted = _predicted(report_of(session))
    spent = [session.diagnostics.stage_seconds.get(stage, 0.0) for stage in ("fit", "further partitions")]
    return Entry(workload, budget, predicted, static, seconds, *spent)


def _warmed(workload: Workload, job: Job) -> float:
    """Seconds of the first step; there is a second one."""
    first, _ = (time_step(workload, torch.device(job.device)) for _ in range(2))
    return first


def _sums(workload: Workload) -> tuple[float, float]:
    """(loss, norm of all gradients)."""
    workload.drop_gradients()
    return workload.value_of(workload.step()), workload.gradient_norm()


def _predicted(report: Any) -> tuple[int, int]:
    """(static, all) bytes predicted of a step that makes its gradients."""
    assert report.step is not None, "a compiled step has a prediction"
    static = report.step.static_bytes - dict(report.step.static)["gradients before the step"]
    return static, static + report.step.peak.num_bytes


def _floats(series: dict[str, list[float]]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(map(float, numbers)) for name, numbers in series.items()}


@dataclass(frozen=True)
class Point:
    """One budget, 0 for none, and bytes of whole steps: parameters and what else is there before them included."""

    budget: int
    predicted: int
    measured: int
    skewed_predicted: int
    skewed_measured: int
    seconds: float


def measure_predictions(job: Job) -> Measurement:
    """Every point's figures in `series`, under the names of `Point`'s fields."""
    cold = is_cache_empty()
    device = torch.device(job.device)
    points: list[Point] = []
    for name in job.points:
        wanted = {NO_BUDGET: 0, LEAST: _TOO_LITTLE}.get(name)
        if wanted is None:
            wanted = int(float(name) * points[0].predicted)
        try:
            points.append(_point(job, device, wanted))
        except BudgetInfeasible as error:
            points.append(_point(job, device, error.minimum_bytes))
    columns = [asdict(point) for point in points]
    return Measurement(
        step_seconds=tuple(point.seconds for point in points),
        cold=cold,
        peak_bytes=points[-1].measured,
        value=0.0,
        gradient_norm=1.0,
        gradient_checksum=0.0,
        matmul_flops_per_second=matmul_rate(getattr(torch, job.dtype), device),
        series=_floats({name: [column[name] for column in columns] for name in columns[0]}),
    )


def _point(job: Job, device: torch.device, budget: int) -> Point:
    torch._dynamo.reset()
    model, inputs = build_architecture(job, device)
    memfine_fx.optimize(model, memory_budget=budget or None, dynamic=True)

    def step() -> None:
        model(**inputs).loss.backward()

    step()
    predicted, measured, seconds = _traced(model, step, device)
    with torch.no_grad():
        for router in routers_of(model):
            router.zero_()
    skewed_predicted, skewed_measured, _ = _traced(model, step, device)
    return Point(budget, predicted, measured, skewed_predicted, skewed_measured, seconds)


def _traced(model: torch.nn.Module, step: Callable[[], None], device: torch.device) -> tuple[int, int, float]:
    """(predicted, measured) bytes of a step that makes its gradients, and its seconds while traced."""
    model.zero_grad(set_to_none=True)
    trace = trace_memory(step, device)
    static, predicted = _predicted(memfine_fx.report(model))
    return predicted, static + trace.peak_bytes, trace.times_us[-1] / 1e6


def routers_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights that choose experts."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("gate.weight", "router.weight", "router.layer.weight", "gate.wg.weight")):
            yield parameter
