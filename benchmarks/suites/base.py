"""What a suite is: tables of jobs, and words about their rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.records import Row, Sizes


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
    """One ``--suite``. A file of `benchmarks.suites` that defines `SUITE` is all that a new one takes.

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
        compute: for a suite that measures nothing here: its whole output, as text and as JSON.
    """

    name: str
    about: str
    parts: Callable[[bool], Sequence[Part]]
    rounds: int = 3
    quick_rounds: int = 1
    device: str = "cpu"
    job_limit_s: float = 1800.0
    total_limit_s: float = float("inf")
    empties_caches: bool = False
    conclude: Callable[[Sequence[Row]], str] | None = None
    compute: Callable[[], tuple[str, str]] | None = None
