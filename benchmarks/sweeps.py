"""Jobs that go through several points in one process: sweeps of one layer, and the search for the longest sequence.

All points of a job share one compilation with symbolic sizes, as training with changing sequences does; the
first two points tell the compiler what changes. ``workload`` "sweep" takes its points from `Job.points`:

    T=4096        so many tokens, the job's load
    load=zipf:1   the job's tokens under another load

``workload`` "longest" looks for the largest number of tokens whose step's peak keeps within `Job.limit_bytes`,
by doubling and then bisection, in multiples of `STRIDE`. What fits is decided by exact allocator bytes.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch._dynamo.utils import counters

from benchmarks.measuring import is_cache_empty, summed_up, time_step
from benchmarks.records import Job, Measurement, Sizes
from benchmarks.workloads import Workload
from benchmarks.workloads.layer import Layer, build_layer
from memfine_fx.memory.measure import trace_memory

STRIDE = 64
MOST_TOKENS = 1 << 20
_RELATIVE_STEP = 0.01


def measure_sweep(job: Job) -> Measurement:
    """The last point's figures, and every point's peak and step time in `series`."""
    cold = is_cache_empty()
    device = torch.device(job.device)
    layer = build_layer(job)
    _compile_symbolic(layer)
    peaks, medians = [], []
    for point in job.points:
        workload = layer.at(*_place(job, point))
        time_step(workload, device)
        seconds = tuple(time_step(workload, device) for _ in range(job.steps))
        peaks.append(_peak_bytes(workload, device))
        medians.append(statistics.median(seconds))
    series = {"peak_bytes": tuple(map(float, peaks)), "seconds": tuple(medians)}
    return replace(summed_up(workload, job, seconds, peaks[-1]), cold=cold, graphs=_num_graphs(), series=series)


def measure_longest(job: Job) -> Measurement:
    """The search's answer in ``series["tokens"]``, with its probes."""
    cold = is_cache_empty()
    device = torch.device(job.device)
    layer = build_layer(job)
    _compile_symbolic(layer)
    probes: dict[int, int] = {}

    def fits(tokens: int) -> bool:
        workload = layer.at(_with_tokens(job.sizes, tokens), job.load)
        probes[tokens] = _peak_bytes(workload, device)
        return probes[tokens] <= job.limit_bytes

    longest = search_longest(fits)
    workload = layer.at(_with_tokens(job.sizes, max(longest, STRIDE)), job.load)
    seconds = tuple(time_step(workload, device) for _ in range(job.steps))
    series = {
        "tokens": (float(longest),),
        "probed_tokens": tuple(map(float, probes)),
        "probed_bytes": tuple(map(float, probes.values())),
    }
    compared = layer.at(job.sizes, job.load)  # every peer on the same tokens
    compared.step()
    found = summed_up(compared, job, seconds, probes.get(longest, 0))
    return replace(found, cold=cold, graphs=_num_graphs(), series=series)


MEASURES: dict[str, Callable[[Job], Measurement]] = {"sweep": measure_sweep, "longest": measure_longest}


def search_longest(fits: Callable[[int], bool]) -> int:
    """The largest multiple of `STRIDE` that fits, to within a hundredth; 0 where not even `STRIDE` does."""
    low, high = 0, STRIDE
    while high <= MOST_TOKENS and fits(high):
        low, high = high, 2 * high
    while high - low > max(STRIDE, _RELATIVE_STEP * low):
        middle = (low + high) // 2 // STRIDE * STRIDE
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _place(job: Job, point: str) -> tuple[Sizes, str]:
    kind, _, value = point.partition("=")
    if kind == "T":
        return _with_tokens(job.sizes, int(value)), job.load
    if kind == "load":
        return job.sizes, value
    raise ValueError(f"point {point!r} is unknown; expected T=NUMBER or load=NAME")


def _with_tokens(sizes: Sizes, tokens: int) -> Sizes:
    return replace(sizes, batch=1, sequence=tokens)


def _compile_symbolic(layer: Layer) -> None:
    for tokens in (STRIDE * 3, STRIDE * 5):
        layer.at(_with_tokens(layer.job.sizes, tokens), layer.job.load).step()


def _peak_bytes(workload: Workload, device: torch.device) -> int:
    """Of a step that makes its gradients, beyond them; traced again if something was compiled meanwhile."""
    while True:
        graphs = _num_graphs()
        workload.drop_gradients()
        trace = trace_memory(workload.step, device, beyond=workload.gradients)
        if _num_graphs() == graphs:
            return trace.peak_bytes


def _num_graphs() -> int:
    """Graphs that Dynamo has captured in this process."""
    return int(counters["stats"]["unique_graphs"])
