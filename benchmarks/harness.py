"""Run jobs, each in a fresh process, and keep every finished row.

Rounds are interleaved, peers A B C then A B C again, so that a slow minute of the machine meets all of them.
Each job has a compile cache of its own, empty in the first round: its compile time is cold. Later rounds find
it filled and start quickly. One cache for all saves time instead: equal kernels are compiled once.

On CPU every child runs under a memory limit, so that one which asks for too much gets an error, a result like
any other, instead of taking the machine down.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks.peers import find_peer
from benchmarks.records import UNAVAILABLE, Job, Row
from memfine_fx.demo.runner import open_progress
from memfine_fx.memory.machine import host_bytes

_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Unsupported|Chunk|Infeasible)\b")
Run = Callable[[Job, Path, float], Row]
_TOLD_LINES = 60
# Of the machine's memory, to leave room for the rest of it.
_DEFAULT_SHARE = 0.8


def run_rounds(
    jobs: Sequence[Job],
    *,
    rounds: int,
    json_file: Path | None,
    run: Run | None = None,
    memory_limit_bytes: int | None = None,
    job_limit_s: float = 1800.0,
    total_limit_s: float = float("inf"),
    shared_cache: Path | None = None,
    parallel: int = 1,
) -> list[Row]:
    """All rows of ``jobs``: those finished earlier in ``json_file``, and new ones, added to it one by one.

    A row with an error is run again, unless memory ran out. After ``total_limit_s`` no further job starts;
    running again with the same file goes on from there.

    Args:
        run: one job in a process of its own; another one in tests.
        memory_limit_bytes: of one child; by default most of the machine, shared out among ``parallel``.
        shared_cache: a folder of compiled code for all jobs, in place of an empty one each.
        parallel: jobs at a time, on a like share of the cores: their bytes stay exact, their times do not.
    """
    limit = memory_limit_bytes or default_memory_limit() // parallel
    threads = max(1, (os.cpu_count() or 1) // parallel) if parallel > 1 else None
    run = run or partial(run_in_process, memory_limit_bytes=limit, num_threads=threads)
    kept = {(row.job.key, row.round): row for row in read_rows(json_file) if row.is_finished}
    started = time.monotonic()
    progress = open_progress(rounds * len(jobs))
    lock = threading.Lock()

    def finish(job: Job, round_: int, cache: Path) -> Row | None:
        with lock:
            progress.set_description(f"round {round_ + 1}: {job.workload}, {job.peer}, {job.dtype}")
        row = kept.get((job.key, round_))
        if row is None and time.monotonic() - started < total_limit_s:
            row = replace(run(job, cache, job_limit_s), round=round_)
            with lock:
                _append(json_file, row)
        with lock:
            progress.update(1)
        return row

    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="memfine_bench_") as caches, ThreadPoolExecutor(parallel) as pool:
        folders = [shared_cache or Path(caches) / job.key for job in jobs]
        for round_ in range(rounds):
            rows += [row for row in pool.map(finish, jobs, [round_] * len(jobs), folders) if row is not None]
    progress.close()
    if len(rows) < rounds * len(jobs):
        print(f"stopped after {total_limit_s:.0f} s: {len(rows)} of {rounds * len(jobs)} rows are finished")
    return rows


def run_in_process(
    job: Job,
    cache: Path,
    limit_s: float,
    memory_limit_bytes: int | None = None,
    num_threads: int | None = None,
) -> Row:
    """One worker's row; an error's row where the worker ended badly, or the peer is not there to run."""
    missing = find_peer(job.workload, job.peer).missing(job.device)
    if missing is not None:
        return Row(job, round=0, error=UNAVAILABLE + missing)
    command = [sys.executable, "-m", "benchmarks.worker", json.dumps(asdict(job))]
    command += [] if memory_limit_bytes is None else [str(memory_limit_bytes)]
    environment = worker_environment(cache, num_threads)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Row(job, round=0, error=f"no result within {limit_s:.0f} s")
    if done.returncode != 0:
        print(f"{job.workload}, {job.peer}, {job.dtype}:\n{_end_of(done.stderr)}", file=sys.stderr, flush=True)
    if done.returncode < 0:
        last = last_error_line(done.stderr)
        return Row(job, round=0, error=f"ended by signal {-done.returncode}: {last}")
    if done.returncode != 0:
        return Row(job, round=0, error=last_error_line(done.stderr))
    return Row.from_json(done.stdout.splitlines()[-1])


def worker_environment(cache: Path, num_threads: int | None = None) -> dict[str, str]:
    """The worker imports this same checkout, caches compiled code in ``cache`` alone, and keeps to its threads."""
    cache.mkdir(parents=True, exist_ok=True)
    root = str(Path(__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    dropped = ("TRITON_CACHE_DIR",)  # Inductor then keeps Triton's cache inside its own
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    threads = {} if num_threads is None else dict.fromkeys(names, str(num_threads))
    return {
        **{name: value for name, value in os.environ.items() if name not in dropped},
        **threads,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def _end_of(stderr: str) -> str:
    return "\n".join(stderr.splitlines()[-_TOLD_LINES:])


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


def default_memory_limit() -> int:
    """Bytes that one child may take on this machine."""
    return int(_DEFAULT_SHARE * host_bytes())


def _append(json_file: Path | None, row: Row) -> None:
    if json_file is None:
        return
    json_file.parent.mkdir(parents=True, exist_ok=True)
    with json_file.open("a") as file:
        file.write(row.to_json() + "\n")
