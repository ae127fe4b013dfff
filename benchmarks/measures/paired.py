"""How long are the steps of peers that take turns, against each other?

Each peer lives in a process of its own, compiled and warm; a round is one step of each while the others idle. A machine
whose speed drifts from minute to minute drifts under all peers alike, so ratios of steps of one round say more than
medians of processes that ran one after the other. Times only: peaks and equality are the harness's.

--suite's first table is run, or that of --workload, in --dtype or its first one, at --sizes where these are given
("sequence=4096,hidden=2048"); the first of --peers is what others are compared with.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace

import torch

from benchmarks.measures import Answer, Dtype
from benchmarks.measuring import BUILDERS, time_step
from benchmarks.records import Job, Sizes
from benchmarks.suites import jobs_of

_WARM_STEPS = 2


def measure(
    suite: str = "model",
    dtype: Dtype | None = None,
    peers: str = "compile,memfine",
    quick: bool = False,
    rounds: int = 9,
    sizes: str = "",
    workload: str | None = None,
) -> Answer:
    names = peers.split(",")
    every = jobs_of(suite, quick=quick, peers=names, steps=1, workloads=None if workload is None else [workload])
    jobs = {job.peer: job for job in reversed(every) if job.dtype == (dtype or every[0].dtype)}
    for peer, job in jobs.items():
        jobs[peer] = replace(job, sizes=_changed(job.sizes, sizes))
    workers = {peer: _start(jobs[peer]) for peer in names}
    for worker in workers.values():
        _step(worker)  # answers once it is warm; one after the other
    steps = [{peer: _step(worker) for peer, worker in workers.items()} for _ in range(rounds)]
    for worker in workers.values():
        worker.communicate()  # the end of its input ends it
    first = names[0]
    row = {
        "sizes": str(jobs[first].sizes),
        "dtype": jobs[first].dtype,
        "median_seconds": {peer: _median(step[peer] for step in steps) for peer in names},
        f"median_ratio_to_{first}": {peer: _median(step[peer] / step[first] for step in steps) for peer in names},
        "seconds": {peer: [round(step[peer], 4) for step in steps] for peer in names},
    }
    return Answer(row=row)


def _changed(sizes: Sizes, text: str) -> Sizes:
    """Sizes with these in their place.

    Raises:
        ValueError: a word is not NAME=NUMBER.
        TypeError: no size has such a name.
    """
    words = [word.partition("=") for word in text.split(",") if word]
    return replace(sizes, **{name: int(number) for name, _, number in words})


def _median(numbers: Iterable[float]) -> float:
    return round(statistics.median(numbers), 4)


def _start(job: Job) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.measures.paired", json.dumps(asdict(job))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _step(worker: subprocess.Popen[str]) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write("step\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def _serve(job_text: str) -> None:
    """A peer: warm up, then one step a line of standard input, its seconds a line of standard output."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = Job.from_dict(json.loads(job_text))
    workload, device = BUILDERS[job.kind](job), torch.device(job.device)
    for _ in range(_WARM_STEPS):
        time_step(workload, device)
    for _ in sys.stdin:
        print(time_step(workload, device), file=out, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
