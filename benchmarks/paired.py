"""Peers step by step in turn: ``python -m benchmarks.paired --suite model --peers compile,memfine --rounds 9``.

Each peer lives in a process of its own, compiled and warm; a round is one step of each while the others idle. A machine
whose speed drifts from minute to minute drifts under all peers alike, so ratios of steps of one round say more than
medians of processes that ran one after the other. One JSON line; times only, peaks and equality are the harness's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "paired.jsonl"
_WARM_STEPS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paired", description=__doc__)
    parser.add_argument("--suite", default="model", help="its first table is run")
    parser.add_argument("--dtype", help="of the table, float32 or bfloat16; the suite's first where not given")
    parser.add_argument("--peers", default="compile,memfine", help="the first is what the others are compared with")
    parser.add_argument("--quick", action="store_true", help="the suite's small sizes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keep", action="store_true", help=f"append the line to {RESULTS.name}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _serve(options.worker)
        return 0
    line = json.dumps(_compare(options.suite, options.dtype, options.peers.split(","), options.rounds, options.quick))
    print(line)
    if options.keep:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    return 0


def _compare(suite: str, dtype: str | None, peers: Sequence[str], rounds: int, quick: bool) -> dict[str, object]:
    import torch

    from benchmarks.jobs import jobs_of
    from benchmarks.machine import describe_machine

    all_jobs = jobs_of(suite, quick=quick, peers=peers, steps=1)
    jobs = {job.peer: job for job in reversed(all_jobs) if job.dtype == (dtype or all_jobs[0].dtype)}
    workers = {peer: _start(json.dumps(asdict(jobs[peer]))) for peer in peers}
    for worker in workers.values():
        _step(worker)  # answers once it is warm; one after the other
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    for _ in range(rounds):
        for peer, worker in workers.items():
            seconds[peer].append(_step(worker))
    for worker in workers.values():
        worker.communicate()  # the end of its input ends it
    first = seconds[peers[0]]
    return {
        "suite": suite,
        "sizes": str(jobs[peers[0]].sizes),
        "dtype": jobs[peers[0]].dtype,
        "rounds": rounds,
        "median_seconds": {peer: round(statistics.median(steps), 4) for peer, steps in seconds.items()},
        f"median_ratio_to_{peers[0]}": {
            peer: round(statistics.median(one / other for one, other in zip(steps, first, strict=True)), 4)
            for peer, steps in seconds.items()
        },
        "seconds": {peer: [round(step, 4) for step in steps] for peer, steps in seconds.items()},
        "machine": str(describe_machine(torch.device(jobs[peers[0]].device))),
    }


def _start(job: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.paired", "--worker", job]
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

    import torch

    from benchmarks.records import Job
    from benchmarks.workloads import build_workload

    job = Job.from_dict(json.loads(job_text))
    workload = build_workload(job)

    def step() -> float:
        workload.drop_gradients()
        started = time.perf_counter()
        workload.step()
        if job.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(_WARM_STEPS):
        step()
    for _ in sys.stdin:
        print(step(), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
