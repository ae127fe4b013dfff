"""What matters: one factor varied at a time around a request, the strategy chosen anew at every value.

1. A point is a request with one factor changed, answered by the local search from its neighbour's answer.
2. Where time goes at a point: the step's terms and the failures, as shares of the wall-clock; the bottleneck is the
   largest that is no matrix product or attention. It takes over where it becomes another one.
3. Elasticities at the request itself: per cent of useful speed per cent of a rate, a link or a time, with the strategy
   kept. Memory has none: it decides what fits, and only a sweep shows that.

Factors: gpus, seq (tokens a step unchanged), global_batch; network, NVLink and storage bandwidth, memory and its
bandwidth, arithmetic (a multiple of all rates); mtbf, hours between interruptions of one GPU; and any size of the
strategy (ep, tp, pp, cp, chunks, micro_batch, rows_per_round).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memfine_fx.errors import ConfigError
from memfine_planner.costs.calibration import Calibration, fitted
from memfine_planner.costs.strategy import Strategy
from memfine_planner.hardware.systems import System
from memfine_planner.training.faults import best_interval, checkpoint_cost
from memfine_planner.training.search import quick_best
from memfine_planner.training.tuner import Candidate, Request, time_candidate

__all__ = [
    "FACTORS",
    "Elasticity",
    "Point",
    "Study",
    "Sweep",
    "elasticities",
    "parse_factor",
    "shares",
    "study",
    "sweep",
]

_POINTS = 9
_MOVED = 0.1
_SYSTEM = {
    "bandwidth": ("network_gb_per_s", "GB/s of network a GPU"),
    "nvlink": ("nvlink_gb_per_s", "GB/s of NVLink a GPU"),
    "hbm": ("memory_gb_per_s", "GB/s of memory"),
    "memory": ("memory_gib", "GiB of memory"),
    "storage": ("storage_gb_per_s_per_gpu", "GB/s of storage a GPU"),
}
_SIZES = ("ep", "tp", "pp", "vp", "cp", "chunks", "rows_per_round", "micro_batch", "offload_layers")
_WHOLE = {"gpus": "GPUs", "seq": "tokens a sequence", "global_batch": "sequences a step"}
FACTORS = {
    **_WHOLE,
    **{name: text for name, (_, text) in _SYSTEM.items()},
    "flops": "times the arithmetic rates",
    "mtbf": "h between interruptions of a GPU",
    **{name: f"{name} of the strategy" for name in _SIZES},
}
"""Every factor that can be swept, and its unit."""
PRODUCTIVE = ("attention compute", "expert compute", "dense FFN compute", "head and loss", "router")


@dataclass(frozen=True)
class Point:
    """One value of a factor: the best strategy there, or None where nothing fits or no strategy is valid.

    Args:
        shares: (name, fraction of the wall-clock), largest first, failures among them; they add up to 1.
    """

    value: float
    best: Candidate | None
    shares: tuple[tuple[str, float], ...] = ()

    @property
    def speed(self) -> float:
        """Useful tokens per second and GPU: failures, and what is lost to them, taken off."""
        return self.best.useful_tokens_per_s / self.best.strategy.gpus if self.best else 0.0

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The largest share that is no product, attention or head."""
        return next((share for share in self.shares if share[0] not in PRODUCTIVE), ("", 0.0))


@dataclass(frozen=True)
class Sweep:
    """One factor's points in order of value; `base` is the point of the request itself."""

    factor: str
    points: tuple[Point, ...]
    base: Point

    @property
    def takeovers(self) -> tuple[tuple[float, str], ...]:
        """(value, bottleneck) of the first point and of every point where it changes."""
        found: list[tuple[float, str]] = []
        for point in self.points:
            if point.best and (not found or found[-1][1] != point.bottleneck[0]):
                found.append((point.value, point.bottleneck[0]))
        return tuple(found)

    @property
    def gain(self) -> tuple[float, float]:
        """Speed at the slowest and the fastest point, relative to the request's."""
        speeds = [point.speed for point in self.points if point.best]
        if not speeds or not self.base.speed:
            return 1.0, 1.0
        return min(speeds) / self.base.speed, max(speeds) / self.base.speed


@dataclass(frozen=True)
class Elasticity:
    """Per cent of useful speed per per cent of `factor`, at the request, its strategy kept."""

    factor: str
    value: float


@dataclass(frozen=True)
class Study:
    """Sweeps around one request, and what each rate, link and time does to it; none where nothing fits."""

    sweeps: tuple[Sweep, ...]
    elasticities: tuple[Elasticity, ...]


def study(
    request: Request,
    factors: Iterable[tuple[str, Sequence[float]]],
    best: Strategy | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Study:
    """`sweep`, and `elasticities` of the best strategy of the request."""
    swept = sweep(request, factors, best, progress)
    base = swept[0].base.best if swept else None
    return Study(swept, elasticities(request, base) if base else ())


def parse_factor(text: str) -> tuple[str, tuple[float, ...]]:
    """A factor and its values: "gpus=64:16384" (doubling), "seq=4096:65536:5" (so many) or "ep=1,8,64".

    Raises:
        ConfigError: the factor is not known, or a value is no positive number (an integer, for sizes).
    """
    name, _, given = text.partition("=")
    if name not in FACTORS:
        raise ConfigError(f"--sweep {text}: unknown factor {name!r}; known: {', '.join(FACTORS)}")
    is_whole = name in _WHOLE or name in _SIZES
    separator = ":" if ":" in given else ","
    try:
        numbers = [float(part) for part in given.split(separator)]
    except ValueError:
        raise ConfigError(f"--sweep {text}: expected {name}=LOW:HIGH, {name}=LOW:HIGH:COUNT or {name}=A,B,C") from None
    if any(not 0 < number < math.inf or (is_whole and number != int(number)) for number in numbers):
        kind = "positive integers" if is_whole else "positive numbers"
        raise ConfigError(f"--sweep {text}: values of {name} are {kind}")
    if separator == ",":
        return name, tuple(sorted(set(numbers)))
    low, high, count = numbers[0], numbers[1], int(numbers[2]) if len(numbers) == 3 else 0
    if len(numbers) > 3 or high < low or count == 1 or numbers[2:] not in ([], [count]):
        raise ConfigError(f"--sweep {text}: expected {name}=LOW:HIGH or {name}=LOW:HIGH:COUNT, low before high")
    count = count or min(_POINTS, 1 + max(1, round(math.log2(high / low))))
    values = [low * (high / low) ** (index / (count - 1)) for index in range(count)]
    return name, tuple(sorted({float(round(value)) if is_whole else float(f"{value:.6g}") for value in values}))


def changed(request: Request, factor: str, value: float) -> Request:
    """The request with one factor at a value."""
    if factor == "gpus":
        gpus = int(value)
        spares = math.ceil(request.faults.spares * gpus / request.gpus)
        batch = max(1, request.global_batch * gpus // request.gpus)
        return replace(request, gpus=gpus, global_batch=batch, faults=replace(request.faults, spares=spares))
    if factor == "seq":
        batch = max(1, round(request.global_batch * request.seq / value))
        return replace(request, seq=int(value), global_batch=batch)
    if factor == "global_batch":
        return replace(request, global_batch=int(value))
    if factor == "mtbf":
        return replace(request, faults=replace(request.faults, rate_per_gpu_hour=1 / value))
    if factor in _SIZES:
        return replace(request, fixed=(*(pair for pair in request.fixed if pair[0] != factor), (factor, int(value))))
    return replace(request, system=_other_system(request.system, factor, value))


def _other_system(system: System, factor: str, value: float) -> System:
    if factor == "flops":
        return system.model_copy(update={"tflops": {name: rate * value for name, rate in system.tflops.items()}})
    return system.model_copy(update={_SYSTEM[factor][0]: value})


def base_value(request: Request, best: Candidate | None, factor: str) -> float | None:
    """The request's own value of a factor, None for a size that nothing fits."""
    if factor in _WHOLE:
        return float(getattr(request, factor))
    if factor == "mtbf":
        rate = request.faults.rate_per_gpu_hour
        return 1 / rate if rate else None
    if factor == "flops":
        return 1.0
    if factor in _SYSTEM:
        return float(getattr(request.system, _SYSTEM[factor][0]))
    return None if best is None else float(getattr(best.strategy, factor))


def sweep(
    request: Request,
    factors: Iterable[tuple[str, Sequence[float]]],
    best: Strategy | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Sweep, ...]:
    """Each factor at its values, the others as in the request.

    Args:
        best: the request's own best strategy, where a search has found it.
        progress: called with (done, all).
    """
    factors = list(factors)
    base = _point(request, math.nan, (best,) if best else ())
    total, done = sum(len(values) for _, values in factors), 0
    found = []
    for factor, values in factors:
        points: list[Point] = []
        for value in values:
            near = [point.best.strategy for point in points[-1:] if point.best]
            near += [base.best.strategy] if base.best else []
            points.append(_point(changed(request, factor, value), value, near))
            done += 1
            if progress:
                progress(done, total)
        own = base_value(request, base.best, factor)
        found.append(Sweep(factor, tuple(points), replace(base, value=math.nan if own is None else own)))
    return tuple(found)


def _point(request: Request, value: float, near: Sequence[Strategy]) -> Point:
    best = quick_best(request, near)
    if best is None and near:
        # What fits elsewhere may lead nowhere here: begin again from everywhere.
        best = quick_best(request)
    return Point(value, best, shares(best) if best else ())


def shares(candidate: Candidate) -> tuple[tuple[str, float], ...]:
    """Fractions of the wall-clock: the step's terms, scaled by the goodput, and the rest as failures."""
    useful = candidate.goodput.fraction
    parts = [(name, seconds / candidate.step.seconds * useful) for name, seconds in candidate.step.terms if seconds > 0]
    return tuple(sorted([*parts, ("failures", 1 - useful)], key=lambda part: -part[1]))


def elasticities(request: Request, best: Candidate) -> tuple[Elasticity, ...]:
    """What a per cent more of each rate, link or time does to the useful speed, largest effect first."""
    cal = fitted()
    named: dict[str, Callable[[float], float]] = {
        name: lambda x, name=name: _speed(_scaled_system(request, name, x), best, cal)  # type: ignore[misc]
        for name in (*_SYSTEM, "flops")
        if name != "memory"
    }
    named["mtbf"] = lambda x: _speed(_scaled_faults(request, rate_per_gpu_hour=1 / x), best, cal)
    named["restart time"] = lambda x: _speed(_scaled_faults(request, restart=x), best, cal)
    named["detection time"] = lambda x: _speed(_scaled_faults(request, detection=x), best, cal)
    named["host time a launch"] = lambda x: _speed(request, best, _slower_host(cal, x))
    up, down = 1 + _MOVED, 1 / (1 + _MOVED)
    found = [Elasticity(name, math.log(speed(up) / speed(down)) / math.log(up / down)) for name, speed in named.items()]
    return tuple(sorted(found, key=lambda entry: -abs(entry.value)))


def _slower_host(cal: Calibration, by: float) -> Calibration:
    return replace(cal, **{name: getattr(cal, name) * by for name in ("launch_us", "expert_us", "chunk_us")})


def _scaled_system(request: Request, factor: str, by: float) -> Request:
    own = 1.0 if factor == "flops" else getattr(request.system, _SYSTEM[factor][0])
    return replace(request, system=_other_system(request.system, factor, own * by))


def _scaled_faults(request: Request, **by: float) -> Request:
    scaled: dict[str, Any] = {name: getattr(request.faults, name) * factor for name, factor in by.items()}
    return replace(request, faults=replace(request.faults, **scaled))


def _speed(request: Request, best: Candidate, cal: Calibration) -> float:
    """Useful tokens per second of one strategy; its chance to run out of memory is that of the request."""
    cost = checkpoint_cost(request.arch.params, best.strategy, request.system, asynchronous=request.asynchronous)
    plain = best_interval(cost, request.faults, request.gpus)
    found = time_candidate(request, best.strategy, best.peak, best.tight_rank, cal, cost, plain)
    return found.useful_tokens_per_s
