"""From a history of interruptions to what a plan needs: rates, gaps, times and correlation, with bounds.

1. Incidents. Events of one cause on several nodes within `WINDOW` are one interruption of the job (a switch, a feed, a
   driver); so are events of one node. Everything below counts incidents, because a job stops once for each.
2. Rates. Incidents per component and node-hour with exact bounds of a Poisson count (Garwood, Biometrika 1936).
3. Gaps between incidents of the cluster: exponential, or Weibull (a shape below 1 means bursts) where the likelihood
   ratio rejects the exponential at 5%. The gap that the end of the log cuts counts as censored.
4. Times to detect, restart and repair by cause: means of what the log has.
5. Correlation: nodes hit at once, and how much more often than by chance a node that failed fails again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from scipy.optimize import brentq
from scipy.special import betainc, gammainc, gammaincinv

from memfine_fx.errors import ConfigError
from memfine_planner.training.faults import FaultModel
from memfine_planner.training.history import Event, History

__all__ = [
    "CauseTimes",
    "Gaps",
    "Rate",
    "Reliability",
    "Repeats",
    "assess",
    "fault_model",
    "fit_gaps",
    "poisson_bounds",
    "predicted_count",
]

WINDOW = 600.0
"""Seconds within which events of one cause are one incident: about the time-out after which a collective gives up."""
_REJECT_EXPONENTIAL = 3.841
"""95% point of chi-square with one degree of freedom."""
_FEWEST_GAPS = 8
_TAIL = 0.025
_SHAPES = (0.05, 20.0)
_MOST_COUNTED = 1 << 40


@dataclass(frozen=True)
class Rate:
    """Interruptions of a component: how many, per node and hour, and 95% bounds of that rate."""

    component: str
    count: int
    per_node_hour: float
    low: float
    high: float


@dataclass(frozen=True)
class Gaps:
    """Time between interruptions of the whole cluster.

    Args:
        shape: 1 for exponential gaps; below 1 they come in bursts, above 1 they wear out.
        mean: seconds.
        likelihood_ratio: twice the gain in log-likelihood of the Weibull shape over the exponential.
    """

    shape: float
    mean: float
    weibull_shape: float
    likelihood_ratio: float
    count: int

    @property
    def kind(self) -> str:
        return "exponential" if self.shape == 1.0 else "Weibull"


@dataclass(frozen=True)
class CauseTimes:
    """Mean seconds of one cause, None for what the log does not have."""

    cause: str
    count: int
    downtime: float | None
    detection: float | None
    restart: float | None
    repair: float | None


@dataclass(frozen=True)
class Repeats:
    """Failures of a node or rack that failed before: seen, expected if all were alike, and the chance of as many."""

    what: str
    seen: int
    expected: float
    chance: float


@dataclass(frozen=True)
class Reliability:
    """What a history says.

    Args:
        batches: (nodes, share of the incidents that take nodes) of how many nodes one incident takes out.
        needs_node: fraction of incidents after which a node must be replaced; None where the history does not say.
        times: by cause, most frequent first.
    """

    history: History
    incidents: int
    total: Rate | None
    components: tuple[Rate, ...]
    gaps: Gaps | None
    times: tuple[CauseTimes, ...]
    needs_node: float | None
    batches: tuple[tuple[int, float], ...]
    repeats: tuple[Repeats, ...]

    def mean_of(self, name: str) -> float | None:
        """Mean "downtime", "detection", "restart" or "repair" over all incidents that have it."""
        known = [(times.count, value) for times in self.times if (value := getattr(times, name)) is not None]
        return sum(n * value for n, value in known) / sum(n for n, _ in known) if known else None


def assess(history: History) -> Reliability:
    """Everything that a history says."""
    if not history.events:
        return _assess_counts(history)
    incidents = _incidents(history.events)
    hours = history.node_hours
    assert hours is not None and history.days is not None
    components = Counter(incident[0].component for incident in incidents)
    starts = [incident[0].seconds for incident in incidents]
    # Where the log's own first event starts the observation, the cut gap at its end is what remains.
    cut = history.days * 86_400 - (starts[-1] - starts[0])
    says_repair = any(event.repair is not None for event in history.events)
    took = [sum(not says_repair or bool(event.repair) for event in _one_per_node(incident)) for incident in incidents]
    sizes = Counter(size for size in took if size)
    return Reliability(
        history,
        len(incidents),
        _rate("all", len(incidents), hours),
        tuple(_rate(name, count, hours) for name, count in components.most_common()),
        fit_gaps([after - before for before, after in pairwise(starts)], cut),
        _times(incidents),
        sum(size > 0 for size in took) / len(took) if says_repair else None,
        tuple((size, count / sizes.total()) for size, count in sorted(sizes.items())) or ((1, 1.0),),
        _repeats(history, incidents),
    )


def _assess_counts(history: History) -> Reliability:
    counts: Counter[str] = Counter()
    for cause in history.causes:
        counts[cause.component] += cause.count
    total, hours = counts.total(), history.node_hours
    needing = sum(cause.count for cause in history.causes if cause.needs_node)
    return Reliability(
        history,
        total,
        None if hours is None else _rate("all", total, hours),
        () if hours is None else tuple(_rate(name, count, hours) for name, count in counts.most_common()),
        None,
        (CauseTimes("all", total, None, history.detection, history.restart, None),),
        needing / total if needing else None,
        ((1, 1.0),),
        (),
    )


def fault_model(reliability: Reliability, base: FaultModel, at: Literal["mean", "low", "high"] = "mean") -> FaultModel:
    """The faults of a plan by this history; what the history does not say stays as in `base`.

    Args:
        at: "mean", or "low" or "high" for the rate's bounds.

    Raises:
        ConfigError: the history has no rate.
    """
    total, history = reliability.total, reliability.history
    if total is None:
        raise ConfigError(f"{history.name} does not say how long it was observed, so it has no rate of interruptions")
    rate = {"mean": total.per_node_hour, "low": total.low, "high": total.high}[at]
    detection, restart = reliability.mean_of("detection"), reliability.mean_of("restart")
    downtime, repair = reliability.mean_of("downtime"), reliability.mean_of("repair")
    if downtime is not None:
        # Detection and restart are the downtime's parts; without the split all of it stops the job alike.
        if restart is None:
            restart = max(0.0, downtime - (detection or 0.0))
        detection = max(0.0, downtime - restart) if detection is None else detection
    known: dict[str, Any] = {"detection": detection, "restart": restart, "repair": repair}
    known["needs_node"] = reliability.needs_node
    return replace(
        base,
        rate_per_gpu_hour=rate / history.gpus_per_node,
        shape=reliability.gaps.shape if reliability.gaps else 1.0,
        batches=reliability.batches,
        **{name: value for name, value in known.items() if value is not None},
    )


def poisson_bounds(count: int) -> tuple[float, float]:
    """Exact 95% bounds of a Poisson mean of which `count` was seen: quantiles of two gamma distributions."""
    low = float(gammaincinv(count, _TAIL)) if count else 0.0
    return low, float(gammaincinv(count + 1, 1 - _TAIL))


def predicted_count(seen: int, hours: float, other_hours: float) -> tuple[int, int]:
    """95% bounds of what another cluster of the same rate counts in `other_hours`, when `seen` were in `hours`.

    Gamma-Poisson with Jeffreys' prior, so that both the rate's uncertainty and the other count's noise are in it: a
    negative binomial, whose distribution function is an incomplete beta function.
    """
    shape, chance = seen + 0.5, hours / (hours + other_hours)

    def smallest(probability: float) -> int:
        counts = range(_MOST_COUNTED)
        return bisect_left(counts, probability, key=lambda count: float(betainc(shape, count + 1, chance)))

    return smallest(_TAIL), smallest(1 - _TAIL)


def fit_gaps(gaps: Sequence[float], censored: float = 0.0) -> Gaps | None:
    """Exponential or Weibull by likelihood; None for fewer than eight gaps.

    Args:
        gaps: seconds between interruptions; those of no length (clocks of one-second steps) count as one second.
        censored: seconds without an interruption at the end.
    """
    if len(gaps) < _FEWEST_GAPS:
        return None
    lengths = [max(1.0, gap) for gap in gaps]
    ends = [*lengths, max(1.0, censored)]
    logs = [math.log(length) for length in lengths]
    mean_log = sum(logs) / len(logs)

    def slope(shape: float) -> float:
        powers = [math.exp(shape * (math.log(end) - mean_log)) for end in ends]
        weighted = sum(power * math.log(end) for power, end in zip(powers, ends, strict=True))
        return weighted / sum(powers) - 1 / shape - mean_log

    # Gaps all alike have no finite shape, gaps in bursts without end have none above 0.
    low, high = _SHAPES
    shape = low if slope(low) > 0 else high if slope(high) < 0 else float(brentq(slope, low, high))
    # Log-likelihoods at their maxima; the Weibull's powers are relative to the mean logarithm.
    exponential = len(gaps) * (math.log(len(gaps) / sum(ends)) - 1)
    scale_power = sum(math.exp(shape * (math.log(end) - mean_log)) for end in ends) / len(gaps)
    weibull = len(gaps) * (math.log(shape) - math.log(scale_power) - shape * mean_log - 1) + (shape - 1) * sum(logs)
    ratio = max(0.0, 2 * (weibull - exponential))
    chosen = shape if ratio > _REJECT_EXPONENTIAL else 1.0
    return Gaps(chosen, sum(ends) / len(gaps), shape, ratio, len(gaps))


def _rate(component: str, count: int, hours: float) -> Rate:
    low, high = poisson_bounds(count)
    return Rate(component, count, count / hours, low / hours, high / hours)


def _incidents(events: Sequence[Event]) -> list[list[Event]]:
    """Events in order of time, grouped: one cause or one node within the window of the group's first event."""
    open_: list[list[Event]] = []
    found: list[list[Event]] = []
    for event in events:
        open_ = [incident for incident in open_ if event.seconds - incident[0].seconds <= WINDOW]
        same = (
            incident
            for incident in open_
            if event.cause == incident[0].cause or event.node in {other.node for other in incident}
        )
        incident = next(same, None)
        if incident is None:
            incident = []
            open_.append(incident)
            found.append(incident)
        incident.append(event)
    return found


def _one_per_node(incident: Iterable[Event]) -> list[Event]:
    return list({event.node: event for event in incident}.values())


def _times(incidents: Sequence[list[Event]]) -> tuple[CauseTimes, ...]:
    """Of an incident's events the job waits for the longest."""
    by_cause: dict[str, list[list[Event]]] = defaultdict(list)
    for incident in incidents:
        by_cause[incident[0].cause].append(incident)

    def mean(group: list[list[Event]], name: str) -> float | None:
        longest = [
            max(values)
            for incident in group
            if (values := [value for event in incident if (value := getattr(event, name)) is not None])
        ]
        # A node that never left the pool says nothing about how long a repair takes.
        longest = [value for value in longest if value or name != "repair"]
        return sum(longest) / len(longest) if longest else None

    ordered = sorted(by_cause.items(), key=lambda entry: -len(entry[1]))
    names = ("downtime", "detection", "restart", "repair")
    return tuple(CauseTimes(cause, len(group), *(mean(group, name) for name in names)) for cause, group in ordered)


def _repeats(history: History, incidents: Sequence[list[Event]]) -> tuple[Repeats, ...]:
    hits = [event for incident in incidents for event in _one_per_node(incident)]
    found = []
    for what in ("node", "rack"):
        names = [name for event in hits if (name := getattr(event, what)) is not None]
        places = history.nodes if what == "node" else len(set(names))
        if len(names) < 2 or places < 2 or (what == "rack" and len(names) < len(hits)):
            continue
        # Pairs of hits in one place; alike places make each pair meet with chance 1/places.
        seen = sum(count * (count - 1) // 2 for count in Counter(names).values())
        expected = len(names) * (len(names) - 1) / 2 / places
        chance = float(gammainc(seen, expected)) if seen else 1.0
        found.append(Repeats(what, seen, expected, chance))
    return tuple(found)
