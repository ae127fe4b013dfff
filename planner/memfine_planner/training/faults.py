"""What failures cost: goodput with checkpoints, the best interval, spare nodes, days to a number of tokens.

A run is a renewal process. Interruptions are a Poisson process of rate 1/M (M the cluster's mean time between
interruptions). Training advances by `interval` seconds of work, then a checkpoint stops it for `blocking` seconds; the
checkpoint can be restored `durable` seconds after that stop (asynchronous writes). A failure is noticed after
`detection`, the job is back after `restart`, and work since the last durable checkpoint is lost.

Between two failures, with X ~ Exp(M) and cycle L = interval + blocking, the checkpoints that count are those with
k L + durable <= X, so

    E[checkpoints] = exp(-durable/M) exp(-L/M) / (1 - exp(-L/M))
    goodput        = interval E[checkpoints] / (M + E[down])

which is exact, and for durable = 0 Daly's complete model (Daly, FGCS 2006). A further failure during a restart begins
the restart anew: E[down] = detection + H (exp(restart/H) - 1), plus the wait for a replacement node, where H counts
hardware only and M the job's own crashes too (running out of memory in a bad iteration).

With a `shape` other than 1 the gaps between hardware failures are Weibull, as a history may say (`reliability`): begun
anew after each interruption, the same shape for any number of GPUs. Then E[checkpoints] is the sum over k of the chance
that no failure comes before k L + durable, and a restart fails with the chance that a gap is shorter than it.
Young's and Daly's optimal intervals are printed beside the one found numerically.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from memfine_fx.errors import ConfigError
from memfine_planner.costs.strategy import Strategy
from memfine_planner.hardware.systems import System

__all__ = [
    "CheckpointCost",
    "FaultModel",
    "Goodput",
    "best_interval",
    "checkpoint_cost",
    "crash_rate",
    "daly_interval",
    "fewest_spares",
    "goodput",
    "per_gpu_rate",
    "young_interval",
]

_SAVE_OVERHEAD = 5.0
"""Seconds that a checkpoint stops training whatever its size: ranks agree, plan the shards, pin memory. Assumed."""
_QUANTILES = (np.arange(4096) + 0.5) / 4096
_SUMMED = 20_000
PUBLISHED_RATE_PER_GPU_HOUR = 466 / (54 * 24 * 16384)
"""Interruptions of all kinds (419 unexpected, 47 planned) of the 54 days in arXiv 2407.21783 section 3.3.4."""


def per_gpu_rate(interruptions: float, days: float, gpus: int) -> float:
    """Interruptions per GPU and hour of a published run."""
    return interruptions / (days * 24 * gpus)


def crash_rate(chance: float, step_s: float) -> float:
    """Crashes per hour of a job whose steps of `step_s` seconds each crash with this chance (1: practically all do)."""
    return -math.log1p(-min(chance, 1 - 1e-12)) * 3600 / step_s


@dataclass(frozen=True)
class FaultModel:
    """Failures and what the operator does about them; seconds.

    Args:
        rate_per_gpu_hour: interruptions per GPU and hour.
        detection: until the job is known to be dead (a watchdog, or the collective's time-out).
        restart: scheduling, process start, communicator set-up, compilation and loading the checkpoint.
        needs_node: fraction of interruptions after which a node must be replaced.
        repair: until a replaced node is back in the pool.
        spares: spare nodes; with none left the job waits for the first repair.
        crashes_per_hour: interruptions of the whole job that need no node, such as running out of memory.
        shape: of the gaps between failures; 1 for exponential, below 1 in bursts.
        batches: (nodes, share) of how many nodes a failure that needs any takes out at once.
    """

    rate_per_gpu_hour: float = PUBLISHED_RATE_PER_GPU_HOUR
    detection: float = 120.0
    restart: float = 420.0
    needs_node: float = 0.5
    repair: float = 24 * 3600.0
    spares: int = 0
    crashes_per_hour: float = 0.0
    shape: float = 1.0
    batches: tuple[tuple[int, float], ...] = ((1, 1.0),)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "batches":
                continue
            if not 0 <= value < math.inf:
                raise ConfigError(f"faults: {field.name}={value} must not be negative, and finite")
        if self.shape == 0 or any(nodes < 1 or share <= 0 for nodes, share in self.batches):
            raise ConfigError(f"faults: shape={self.shape} and the nodes and shares of batches must be positive")
        if self.needs_node > 1:
            raise ConfigError(
                f"faults: needs_node={self.needs_node} is a fraction of interruptions, expected at most 1"
            )

    def mtbf(self, gpus: int) -> float:
        """Mean seconds between interruptions of `gpus` GPUs."""
        crashes, failures = self.crashes_per_hour / 3600, self.rate_per_gpu_hour * gpus / 3600
        if crashes + failures == 0:
            return math.inf
        if self.shape == 1.0 or not (crashes and failures):
            return 1 / (crashes + failures)
        return float((-np.expm1(-crashes * self.gaps(gpus))).mean() / crashes)

    def gaps(self, gpus: int) -> NDArray[np.float64]:
        """Seconds to the next hardware failure, at equally likely quantiles."""
        scale = self.hardware_mtbf(gpus) / math.gamma(1 + 1 / self.shape)
        return np.asarray(scale * (-np.log1p(-_QUANTILES)) ** (1 / self.shape))

    def hardware_mtbf(self, gpus: int) -> float:
        """The same without crashes of the job: what can go wrong while it restarts."""
        return replace(self, crashes_per_hour=0.0).mtbf(gpus)

    def node_share(self, gpus: int) -> float:
        """Fraction of all interruptions after which a node must be replaced."""
        if not self.rate_per_gpu_hour * gpus:
            return 0.0
        return self.needs_node * (1 - self.crashes_per_hour / 3600 * self.mtbf(gpus))


@dataclass(frozen=True)
class CheckpointCost:
    """One checkpoint: bytes of the whole model, seconds that training stops, seconds until it can be restored."""

    num_bytes: float
    blocking: float
    durable: float
    load: float


@dataclass(frozen=True)
class Goodput:
    """Fraction of wall-clock time that advances training, and where the rest goes (fractions that add up to 1)."""

    interval: float
    fraction: float
    saving: float
    lost_work: float
    down: float
    waiting: float
    mtbf: float

    @property
    def effective_training_time(self) -> float:
        """Time spent training or saving, lost work included: what "effective training time" usually counts."""
        return self.fraction + self.saving + self.lost_work


def checkpoint_cost(params: float, s: Strategy, sys: System, *, asynchronous: bool = True) -> CheckpointCost:
    """Cost of a sharded checkpoint of weights (2 bytes) and optimizer state, every rank writing its share.

    Asynchronous: training stops for the copy to host memory, the write follows. The copy runs at the host link's
    bandwidth with every rank of a replica group owning a part.
    """
    total = params * (2.0 + s.optimizer_bytes)
    share = total / s.gpus
    write = share / (sys.storage_gb_per_s_per_gpu * 1e9)
    copy = _SAVE_OVERHEAD + share / (sys.host_link_gb_per_s * 1e9 * 0.5)
    if asynchronous:
        return CheckpointCost(total, copy, write, write)
    return CheckpointCost(total, copy + write, 0.0, write)


def young_interval(blocking: float, mtbf: float) -> float:
    """Young's first-order optimum (CACM 1974): sqrt(2 * blocking * mtbf)."""
    return math.sqrt(2 * blocking * mtbf)


def daly_interval(blocking: float, mtbf: float) -> float:
    """Daly's higher-order optimum (FGCS 2006), and mtbf when a checkpoint takes more than twice that."""
    if math.isinf(mtbf):
        return mtbf
    if blocking >= 2 * mtbf:
        return mtbf
    x = math.sqrt(blocking / (2 * mtbf))
    return math.sqrt(2 * blocking * mtbf) * (1 + x / 3 + x * x / 9) - blocking


def goodput(interval: float, cost: CheckpointCost, faults: FaultModel, gpus: int) -> Goodput:
    """Expected fractions of time at one checkpoint interval (seconds of work between checkpoints)."""
    mtbf = faults.mtbf(gpus)
    cycle = interval + cost.blocking
    if math.isinf(mtbf):
        return Goodput(interval, interval / cycle, cost.blocking / cycle, 0.0, 0.0, 0.0, mtbf)
    saved = _saved_checkpoints(cycle, cost.durable, faults, gpus)
    again, reloading = _reloads(faults.restart + cost.load, faults, gpus)
    down = faults.detection + reloading
    # Failures of the restart itself may need a node too.
    needing = faults.node_share(gpus) + faults.needs_node * again
    waiting = needing * spare_wait(faults, needing / (mtbf + down))
    period = mtbf + down + waiting
    useful, saving = interval * saved, cost.blocking * saved
    return Goodput(
        interval,
        useful / period,
        saving / period,
        (mtbf - useful - saving) / period,
        down / period,
        waiting / period,
        mtbf,
    )


def _saved_checkpoints(cycle: float, durable: float, faults: FaultModel, gpus: int) -> float:
    """Expected number of checkpoints between two interruptions that can be restored."""
    mtbf = faults.mtbf(gpus)
    if faults.shape == 1.0 or faults.rate_per_gpu_hour == 0:
        return math.exp(-(durable + cycle) / mtbf) / -math.expm1(-cycle / mtbf)
    scale = faults.hardware_mtbf(gpus) / math.gamma(1 + 1 / faults.shape)
    times = durable + cycle * np.arange(1, _SUMMED + 1)
    survival = np.exp(-((times / scale) ** faults.shape) - faults.crashes_per_hour / 3600 * times)
    if survival[-1] < 1e-12:
        return float(survival.sum())
    # So many cycles fit between failures that rounding down to whole ones costs half a cycle on average.
    gaps = faults.gaps(gpus)
    crashes = faults.crashes_per_hour / 3600
    until = -np.expm1(-crashes * gaps) / crashes if crashes else gaps
    return float(np.maximum(0.0, (until - durable) / cycle - 0.5).mean())


def _reloads(reload: float, faults: FaultModel, gpus: int) -> tuple[float, float]:
    """Expected failures of a restart, and seconds until one succeeds."""
    hardware = faults.hardware_mtbf(gpus)
    if math.isinf(hardware):
        return 0.0, reload
    if faults.shape == 1.0:
        again = math.expm1(min(reload / hardware, 700.0))
        return again, hardware * again
    scale = hardware / math.gamma(1 + 1 / faults.shape)
    succeeds = math.exp(-min((reload / scale) ** faults.shape, 700.0))
    gaps = faults.gaps(gpus)
    failed = float(np.where(gaps < reload, gaps, 0.0).mean())
    return 1 / succeeds - 1, reload + failed / succeeds


def spare_wait(faults: FaultModel, arrivals: float) -> float:
    """Expected wait of a failure that needs nodes, when `spares` stand by and such failures come at rate `arrivals`.

    Nodes in repair are a chain that failures raise by a batch and returns lower by one (repairs exponential, as in the
    simulation); a failure that finds too few spares waits for the first ones to come back. While it waits the job is
    down, so nothing else fails: the chain goes on with every spare in repair. Across the cut between n and n + 1 nodes
    in repair as much goes up as comes down,

        chance(n + 1) (n + 1) / repair = arrivals * sum over j <= n of chance(j) P(batch > n - j)

    which for batches of one is Erlang's recursion.
    """
    if arrivals == 0 or faults.repair == 0:
        return 0.0
    load = arrivals * faults.repair
    most = max(nodes for nodes, _ in faults.batches)
    beyond = [sum(share for nodes, share in faults.batches if nodes > size) for size in range(most)]
    weights = [1.0]
    for in_repair in range(1, faults.spares + 1):
        up = sum(weights[j] * beyond[in_repair - 1 - j] for j in range(max(0, in_repair - most), in_repair))
        weights.append(load * up / in_repair)
        if weights[-1] > 1e200:
            weights = [weight / weights[-1] for weight in weights]
    total = sum(weights)
    return sum(
        weight / total * share * sum(faults.repair / back for back in range(faults.spares + 1, in_repair + nodes + 1))
        for in_repair, weight in enumerate(weights)
        for nodes, share in faults.batches
        if in_repair + nodes > faults.spares
    )


def fewest_spares(cost: CheckpointCost, faults: FaultModel, gpus: int, lost: float = 1e-3) -> int:
    """The fewest spare nodes with which waiting for nodes costs at most `lost` of the time."""
    spares = 0
    while best_interval(cost, replace(faults, spares=spares), gpus).waiting > lost:
        spares = max(spares + 1, spares * 5 // 4)
    return spares


def best_interval(cost: CheckpointCost, faults: FaultModel, gpus: int) -> Goodput:
    """The interval with the highest goodput, searched on its logarithm."""
    mtbf = faults.mtbf(gpus)
    if math.isinf(mtbf):
        return goodput(max(86_400.0, 100 * cost.blocking), cost, faults, gpus)
    low, high = math.log(max(1.0, cost.durable)), math.log(max(10.0, 50 * mtbf))
    if low >= high:
        return goodput(math.exp(low), cost, faults, gpus)
    found = minimize_scalar(
        lambda log: -goodput(math.exp(log), cost, faults, gpus).fraction, bounds=(low, high), options={"xatol": 1e-5}
    )
    return goodput(math.exp(found.x), cost, faults, gpus)


def days_to(tokens: float, tokens_per_s: float, fraction: float) -> float:
    """Days to train on `tokens`; infinite without progress."""
    useful = tokens_per_s * fraction
    return tokens / useful / 86_400 if useful > 0 else math.inf


def sensitivity(
    cost: CheckpointCost, faults: FaultModel, gpus: int, factors: Sequence[float] = (0.25, 0.5, 1, 2, 4, 8)
) -> list[tuple[float, Goodput]]:
    """Best goodput at multiples of the failure rate."""
    return [
        (factor, best_interval(cost, replace(faults, rate_per_gpu_hour=faults.rate_per_gpu_hour * factor), gpus))
        for factor in factors
    ]


def simulate(interval: float, cost: CheckpointCost, faults: FaultModel, gpus: int, days: float, seed: int = 0) -> float:
    """Goodput of one simulated run of about `days` days, event by event: failures, failed restarts, repairs, spares."""
    generator = np.random.default_rng(seed)
    mtbf, cycle = faults.mtbf(gpus), interval + cost.blocking
    if math.isinf(mtbf):
        return interval / cycle
    scale = faults.hardware_mtbf(gpus) / math.gamma(1 + 1 / faults.shape)
    reload, horizon = faults.restart + cost.load, days * 86_400
    clock = useful = 0.0
    in_repair: list[float] = []
    while clock < horizon:
        until, needs_node = _next_interruption(faults, gpus, generator)
        useful += interval * max(0.0, math.floor((until - cost.durable) / cycle))
        clock += until + faults.detection
        clock = _replacement(clock, in_repair, faults, needs_node, generator)
        while (until := scale * float(generator.weibull(faults.shape))) < reload:
            clock = _replacement(clock + until, in_repair, faults, faults.needs_node, generator)
        clock += reload
    return useful / clock


def _next_interruption(faults: FaultModel, gpus: int, generator: np.random.Generator) -> tuple[float, float]:
    """Seconds to the next interruption, and the chance that it needs a node."""
    hardware, crashes = faults.hardware_mtbf(gpus), faults.crashes_per_hour / 3600
    failure = hardware / math.gamma(1 + 1 / faults.shape) * float(generator.weibull(faults.shape))
    crash = float(generator.exponential(1 / crashes)) if crashes else math.inf
    return min(failure, crash), 0.0 if crash < failure else faults.needs_node


def _replacement(
    clock: float, in_repair: list[float], faults: FaultModel, needs_node: float, generator: np.random.Generator
) -> float:
    """When the job has a whole set of nodes again after a failure at `clock`; updates the repairs under way."""
    if generator.random() >= needs_node:
        return clock
    in_repair[:] = [back for back in in_repair if back > clock]
    nodes = _drawn(faults.batches, generator)
    in_repair += [clock + generator.exponential(faults.repair) if faults.repair else clock for _ in range(nodes)]
    while len(in_repair) > faults.spares:
        first = min(in_repair)
        in_repair.remove(first)
        clock = max(clock, first)
    return clock


def _drawn(batches: tuple[tuple[int, float], ...], generator: np.random.Generator) -> int:
    if len(batches) == 1:
        return batches[0][0]
    return int(generator.choice([nodes for nodes, _ in batches], p=[share for _, share in batches]))


def goodput_curve(intervals: NDArray[np.float64], cost: CheckpointCost, faults: FaultModel, gpus: int) -> list[Goodput]:
    """Goodput at each interval, for the figure."""
    return [goodput(float(interval), cost, faults, gpus) for interval in intervals]
