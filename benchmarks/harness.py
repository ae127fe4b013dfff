"""Run jobs, each in a fresh process, and keep every finished row.

Rounds are interleaved, peers A B C then A B C again, so that a slow minute of the machine meets all of them.
Each job has a compile cache of its own, empty in the first round: its compile time is cold. Later rounds find
it filled and start quickly.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.records import Job, Row
from memfine_fx.demo.progress import open_progress

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Unsupported|Chunk|Infeasible)\b")
Run = Callable[[Job, Path, float], Row]


def run_rounds(
    jobs: Sequence[Job],
    *,
    rounds: int,
    json_file: Path | None,
    run: Run | None = None,
    job_limit_s: float = 1800.0,
    total_limit_s: float = float("inf"),
) -> list[Row]:
    """All rows of ``jobs``: those finished earlier in ``json_file``, and new ones, added to it one by one.

    A row with an error is run again, unless memory ran out. After ``total_limit_s`` no further job starts;
    running again with the same file goes on from there.
    """
    run = run or run_in_process
    kept = {(row.job.key, row.round): row for row in read_rows(json_file) if _is_finished(row)}
    rows: list[Row] = []
    started = time.monotonic()
    progress = open_progress(rounds * len(jobs))
    with tempfile.TemporaryDirectory(prefix="memfine_bench_") as caches:
        for round_ in range(rounds):
            for job in jobs:
                progress.set_description(f"round {round_ + 1}: {job.workload}, {job.peer}, {job.dtype}")
                finished = kept.get((job.key, round_))
                if finished is None and time.monotonic() - started < total_limit_s:
                    finished = replace(run(job, Path(caches) / job.key, job_limit_s), round=round_)
                    _append(json_file, finished)
                if finished is not None:
                    rows.append(finished)
                progress.update(1)
    progress.close()
    if len(rows) < rounds * len(jobs):
        print(f"stopped after {total_limit_s:.0f} s: {len(rows)} of {rounds * len(jobs)} rows are finished")
    return rows


def run_in_process(job: Job, cache: Path, limit_s: float) -> Row:
    """One worker's row; an error's row where the worker ended badly."""
    command = [sys.executable, "-m", "benchmarks.worker", json.dumps(asdict(job))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=worker_environment(cache), timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Row(job, round=0, error=f"no result within {limit_s:.0f} s")
    if done.returncode < 0:
        return Row(job, round=0, error=f"ended by signal {-done.returncode}")
    if done.returncode != 0:
        return Row(job, round=0, error=last_error_line(done.stderr))
    return Row.from_json(done.stdout.splitlines()[-1])


def worker_environment(cache: Path) -> dict[str, str]:
    """The worker imports this same checkout, and caches compiled code in ``cache`` alone."""
    cache.mkdir(parents=True, exist_ok=True)
    root = str(Path(__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    dropped = ("TRITON_CACHE_DIR",)  # Inductor then keeps Triton's cache inside its own
    return {
        **{name: value for name, value in os.environ.items() if name not in dropped},
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def last_error_line(stderr: str) -> str:
    """The line that names the exception; tracebacks may be followed by a library's own words."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if _EXCEPTION.match(line)]
    return (named or lines or ["no message"])[-1]


def read_rows(json_file: Path | None) -> list[Row]:
    """The rows of a JSON-lines file; none where it does not exist yet."""
    if json_file is None or not json_file.exists():
        return []
    return [Row.from_json(line) for line in json_file.read_text().splitlines() if line]


def _is_finished(row: Row) -> bool:
    return row.error is None or row.is_out_of_memory


def _append(json_file: Path | None, row: Row) -> None:
    if json_file is None:
        return
    json_file.parent.mkdir(parents=True, exist_ok=True)
    with json_file.open("a") as file:
        file.write(row.to_json() + "\n")
