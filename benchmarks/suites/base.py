"""What a suite is: tables of jobs, and words about their rows, such as what was to be reached."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.records import Row, Sizes
from benchmarks.summaries import Summary, summaries_of

FULL_RECOMPUTE = "compile+checkpoint"
NO_RECOMPUTE = "compile"


@dataclass(frozen=True)
class Part:
    """One table of a suite; fields as in `benchmarks.records.Job`."""

    workload: str
    sizes: Sizes
    dtype: str
    peers: tuple[str, ...]
    load: str = ""
    points: tuple[str, ...] = ()
    limit_bytes: int = 0
    steps: int | None = None  # in place of the command's, where the suite is not about time


@dataclass(frozen=True)
class Suite:
    """One ``--suite``. To define one in a file of `benchmarks.suites` is all that a new one takes.

    Args:
        name: of the suite.
        about: one line for the help text and the report.
        parts: quick or full -> its tables, in the order in which they are measured.
        rounds: how often each job runs in a fresh process; with --quick always once, unless `quick_rounds`.
        device: "cpu", "cuda", or "any" for CUDA where there is one.
        job_limit_s: after which a job is given up.
        total_limit_s: after which no further job starts; the suite goes on when it is run again.
        empties_caches: compile time is what it measures, so that its jobs share no cache, whatever is asked.
        conclude: rows -> what they show, in words and figures, below the tables.
        compute: for a suite without jobs: quick or full -> its whole output, as text and as JSON.
    """

    name: str
    about: str
    parts: Callable[[bool], Sequence[Part]] = lambda quick: ()
    rounds: int = 3
    quick_rounds: int = 1
    device: str = "cpu"
    job_limit_s: float = 1800.0
    total_limit_s: float = float("inf")
    empties_caches: bool = False
    conclude: Callable[[Sequence[Row]], str] | None = None
    compute: Callable[[bool], tuple[str, str]] | None = None


def at_most(what: str, value: float, limit: float) -> str:
    return f"{'met' if value <= limit else 'NOT MET':8}{what}: {value:.3f}, at most {limit:g}"


def at_least(what: str, value: float, limit: float) -> str:
    return f"{'met' if value >= limit else 'NOT MET':8}{what}: {value:.3f}, at least {limit:g}"


def peak_and_time(rows: Sequence[Row], sizes: Sizes, peers: Sequence[str], peak_share: float) -> str:
    """Per dtype and peer of ours: its peak against full recomputation, its time against plain torch.compile.

    Args:
        rows: of a suite.
        sizes: for which the targets were set; rows of others are not judged.
        peers: of ours.
        peak_share: at most, of full recomputation's peak.
    """
    summaries = [one for one in summaries_of(rows) if one.job.sizes == sizes]
    if not summaries:
        return f"Targets are set for {sizes}"
    lines: list[str] = []
    for dtype in dict.fromkeys(one.job.dtype for one in summaries):
        found: dict[str, Summary] = {one.job.peer: one for one in summaries if one.job.dtype == dtype}
        for peer in peers:
            one, full, plain = (found.get(name) for name in (peer, FULL_RECOMPUTE, NO_RECOMPUTE))
            if one and full:
                share = one.peak_bytes / full.peak_bytes
                lines.append(at_most(f"{dtype}, {peer}: peak against {FULL_RECOMPUTE}", share, peak_share))
            if one and plain:
                seconds = one.step_seconds / plain.step_seconds
                lines.append(at_most(f"{dtype}, {peer}: time against {NO_RECOMPUTE}", seconds, 1.0))
    return "\n".join(["Targets", *lines]) if lines else "Targets: their peers were not measured"
