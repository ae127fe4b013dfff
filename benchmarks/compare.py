"""Old rows against new ones: what got worse beyond a tolerance.

Rows meet by table and peer, whatever compiler made them. Worse is a larger peak, a longer step, or a peer that
had figures and has none any more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.records import Row
from benchmarks.summaries import Summary, align, summaries_of


@dataclass(frozen=True)
class Tolerances:
    """Relative growth that is still accepted; None leaves a figure uncompared."""

    bytes_: float | None = 0.02
    seconds: float | None = 0.10


@dataclass(frozen=True)
class Change:
    """One figure, before and after."""

    table: str
    peer: str
    figure: str
    old: float
    new: float | None
    is_worse: bool

    @property
    def cells(self) -> list[str]:
        new = "-" if self.new is None else f"{self.new:,.6g}"
        ratio = "-" if self.new is None or not self.old else f"{self.new / self.old:.3f}"
        return [self.table, self.peer, self.figure, f"{self.old:,.6g}", new, ratio, "WORSE" if self.is_worse else "ok"]


def compare_rows(old: Sequence[Row], new: Sequence[Row], tolerances: Tolerances) -> list[Change]:
    """Every figure of the old rows, in their order."""
    after = {_place(summary): summary for summary in summaries_of(new)}
    return [
        change for summary in summaries_of(old) for change in _changes(summary, after.get(_place(summary)), tolerances)
    ]


def format_changes(changes: Sequence[Change]) -> str:
    header = ["table", "peer", "figure", "old", "new", "ratio", ""]
    return align([header, *(change.cells for change in changes)])


def _place(summary: Summary) -> tuple[str, str, tuple[str, ...]]:
    return summary.job.table, summary.job.peer, summary.job.points


def _changes(old: Summary, new: Summary | None, tolerances: Tolerances) -> Iterator[Change]:
    table, peer = old.job.table, old.job.peer
    if new is None:
        yield Change(table, peer, "peak bytes", old.peak_bytes, None, True)
        return
    if tolerances.bytes_ is not None:
        for figure, before, after in _bytes(old, new):
            yield Change(table, peer, figure, before, after, after > before * (1 + tolerances.bytes_))
    if tolerances.seconds is not None:
        is_worse = new.step_seconds > old.step_seconds * (1 + tolerances.seconds)
        yield Change(table, peer, "step seconds", old.step_seconds, new.step_seconds, is_worse)


def _bytes(old: Summary, new: Summary) -> Iterator[tuple[str, float, float]]:
    if old.job.workload == "longest":  # its peak is the limit; what counts is how far it came
        yield "tokens, inverse", 1 / max(1.0, old.last.series["tokens"][0]), 1 / max(1.0, new.last.series["tokens"][0])
        return
    yield "peak bytes", old.peak_bytes, new.peak_bytes
    pairs = zip(old.last.series.get("peak_bytes", ()), new.last.series.get("peak_bytes", ()), strict=False)
    for place, (before, after) in enumerate(pairs):
        yield f"peak bytes at {place}", before, after
