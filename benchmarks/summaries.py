"""All rounds of a job in one record, and columns for a terminal."""

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.records import Job, Measurement, Row

MIB = 2**20


@dataclass(frozen=True)
class Summary:
    """All rounds of one job."""

    job: Job
    last: Measurement
    step_seconds: float  # median over rounds of each round's median
    step_seconds_min: float
    step_seconds_max: float
    peak_bytes: int
    cold_compile_seconds: float | None
    matmul_flops_per_second: float  # median over the processes of all jobs on the same device in the same dtype


def summarise(rows: Sequence[Row], run: Sequence[Row] | None = None) -> Summary | None:
    """None where no round of the job has figures.

    Args:
        rows: of one job.
        run: of all jobs beside it, itself among them; only it where not given.
    """
    found = [row.measurement for row in rows if row.measurement is not None]
    if not found:
        return None
    every_step = [seconds for measurement in found for seconds in measurement.step_seconds]
    cold = [measurement.compile_seconds for measurement in found if measurement.cold]
    return Summary(
        job=rows[0].job,
        last=found[-1],
        step_seconds=statistics.median(statistics.median(one.step_seconds) for one in found),
        step_seconds_min=min(every_step),
        step_seconds_max=max(every_step),
        peak_bytes=max(one.peak_bytes for one in found),
        cold_compile_seconds=cold[0] if cold else None,
        matmul_flops_per_second=_matmul_rate(rows if run is None else run, rows[0].job),
    )


def summaries_of(rows: Sequence[Row]) -> list[Summary]:
    """Of every job that has figures, in the order of the rows."""
    found = [summarise(same, rows) for same in by_key(rows).values()]
    return [summary for summary in found if summary is not None]


def _matmul_rate(rows: Sequence[Row], job: Job) -> float:
    """What the machine does is one number: a process that measured it in a bad moment does not change its own row."""
    return statistics.median(
        row.measurement.matmul_flops_per_second
        for row in rows
        if row.measurement is not None and (row.job.dtype, row.job.device) == (job.dtype, job.device)
    )


def by_key(rows: Sequence[Row]) -> dict[str, list[Row]]:
    keys = list(dict.fromkeys(row.job.key for row in rows))
    return {key: [row for row in rows if row.job.key == key] for key in keys}


def tokens_of(summary: Summary) -> float:
    """Tokens that one step works on."""
    job, series = summary.job, summary.last.series
    if "rows" in series:
        return sum(series["rows"]) / job.sizes.top_k
    if job.points and job.points[-1].startswith("T="):
        return float(job.points[-1].removeprefix("T="))
    return series["tokens"][0] if "tokens" in series else job.sizes.tokens


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell, the first one to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown(header: str, rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown.

    Args:
        header: its names, with bars between them.
    """
    rule = "---|" * len(header.split("|"))
    return "\n".join([f"| {header.strip()} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)])


def with_blocks(text: str, mark: str, content: Callable[[str], str]) -> str:
    """A page with each block between `<!-- mark -->` or `<!-- mark: name -->` and `<!-- end -->` written anew.

    Args:
        content: of a block by its name, which is "" where it has none.
    """
    block = re.compile(rf"(<!-- {mark}(?:: ([^\n]*))? -->\n).*?(?=<!-- end -->)", re.DOTALL)
    return block.sub(lambda found: f"{found[1]}\n{content(found[2] or '')}\n", text)
