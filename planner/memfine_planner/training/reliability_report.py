"""What a history says, in text, and how well one published history predicts another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from memfine_planner.training.history import History, published_histories
from memfine_planner.training.reliability import Rate, Reliability, predicted_count

__all__ = ["HeldOut", "held_out", "held_out_text", "reliability_text"]

_COMPARED = (
    ("llama3", "rsc1", "all"),
    ("llama3", "rsc2", "all"),
    ("llama3", "opt175b", "all"),
    ("llama3", "b200_504", "gpu"),
)
"""(fitted, predicted, component) of the pairs that count the same kind of interruption; each is read both ways."""


_CHECKED = {"text": "read in its text", "abstract": "read in its abstract", "quoted": "quoted by others, not checked"}


def reliability_text(found: Reliability) -> str:
    """The report of `memfine plan training --history FILE`."""
    history = found.history
    observed = "time not said" if history.days is None else f"{history.days:g} days"
    lines = [
        f"history {history.name}: {history.nodes:,} nodes of {history.gpus_per_node} GPUs, {observed}, "
        f"{found.incidents:,} interruptions" + (f" of {len(history.events):,} events" if history.events else "")
    ]
    if history.source:
        lines.append(f"  source: {history.source} ({_CHECKED[history.checked]})")
    lines += [f"  {remark}" for remark in history.remarks]
    if found.total:
        lines.append(f"  {'component':14}{'count':>7}{'per 1,000 node-days':>21}{'95% bounds':>20}")
        lines += [_rate_line(rate) for rate in (found.total, *found.components)]
    if found.gaps:
        gaps = found.gaps
        lines.append(
            f"  gaps: {gaps.kind}, mean {gaps.mean / 3600:.2f} h (Weibull shape {gaps.weibull_shape:.2f}, likelihood "
            f"ratio {gaps.likelihood_ratio:.1f} of {gaps.count} gaps; exponential is rejected above 3.8)"
        )
    lines += _time_lines(found)
    if found.needs_node is not None:
        shown = ", ".join(f"{nodes}: {share:.1%}" for nodes, share in found.batches)
        lines.append(f"  {found.needs_node:.1%} of the interruptions take nodes; nodes at once {shown}")
    lines += [
        f"  a {repeat.what} fails again: {repeat.seen} pairs, {repeat.expected:.1f} expected if all are alike "
        f"(chance of as many {repeat.chance:.2g})"
        for repeat in found.repeats
    ]
    return "\n".join(lines)


def _rate_line(rate: Rate) -> str:
    bounds = f"{24e3 * rate.low:.2f} to {24e3 * rate.high:.2f}"
    return f"  {rate.component:14}{rate.count:7,}{24e3 * rate.per_node_hour:21.2f}{bounds:>20}"


def _time_lines(found: Reliability) -> list[str]:
    known = [times for times in found.times if times.downtime is not None or times.detection is not None]
    if not known:
        return []
    names = ("downtime", "detection", "restart", "repair")
    lines = [f"  {'mean seconds by cause':32}{'count':>7}" + "".join(f"{name:>11}" for name in names)]
    for times in known:
        cells = ((value := getattr(times, name)) is not None and f"{value:,.0f}" for name in names)
        lines.append(f"  {times.cause:32}{times.count:7,}" + "".join(f"{cell or '':>11}" for cell in cells))
    return lines


@dataclass(frozen=True)
class HeldOut:
    """One history's rate against another's count, per 1,000 node-days.

    Args:
        low, high: 95% bounds of what the other should have counted, if both had one rate.
        measured: what it counted.
    """

    fitted: str
    predicted: str
    component: str
    rate: float
    low: float
    high: float
    measured: float

    @property
    def is_within(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def factor(self) -> float:
        return self.measured / self.rate


def held_out() -> tuple[HeldOut, ...]:
    """Each published history that has a rate, predicted by another's."""
    known = published_histories()
    rows = []
    for one, other, component in _COMPARED:
        for fitted, predicted in permutations((known[one], known[other])):
            rows.append(_compare(fitted, predicted, component))
    return tuple(rows)


def _compare(fitted: History, predicted: History, component: str) -> HeldOut:
    seen, measured = _unplanned(fitted, component), _unplanned(predicted, component)
    hours, other = fitted.node_hours, predicted.node_hours
    assert hours is not None and other is not None
    low, high = predicted_count(seen, hours, other)
    scale = 24e3
    return HeldOut(
        fitted.name,
        predicted.name,
        component,
        scale * seen / hours,
        scale * low / other,
        scale * high / other,
        scale * measured / other,
    )


def _unplanned(history: History, component: str) -> int:
    """Interruptions that nobody planned: research clusters and OPT count no others."""
    return sum(cause.count for cause in history.causes if not cause.planned and component in ("all", cause.component))


def held_out_text() -> str:
    """The table of the documentation."""
    lines = [f"{'fitted':10}{'predicted':11}{'counts':8}{'rate':>7}{'95% of the other':>20}{'measured':>10}"]
    for row in held_out():
        verdict = "within" if row.is_within else f"outside, {row.factor:.2f} times"
        bounds = f"{row.low:.2f} to {row.high:.2f}"
        lines.append(
            f"{row.fitted:10}{row.predicted:11}{row.component:8}{row.rate:7.2f}{bounds:>20}{row.measured:10.2f}"
            f"  {verdict}"
        )
    return "\n".join(lines)
