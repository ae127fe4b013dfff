"""Run one job in this fresh process: ``python -m benchmarks.worker JOB_AS_JSON [MEMORY_LIMIT]`` prints one JSON line.

A memory limit in bytes is the kernel's, on this process's data: what asks for more gets an error, which is a
result. Errors are not caught: the harness reads them from standard error.
"""

import json
import os
import resource
import sys
from collections.abc import Sequence

import torch

from benchmarks.budgets import measure_front, measure_predictions
from benchmarks.machine import describe_machine
from benchmarks.measuring import measure_step
from benchmarks.records import Job, Measurement, Row
from benchmarks.sweeps import MEASURES

_MEASURES = {**MEASURES, "front": measure_front, "prediction": measure_predictions}


def measure(job: Job) -> Measurement:
    """Several points or a search where the workload says so, one workload's step elsewhere."""
    return _MEASURES.get(job.kind, measure_step)(job)


def main(arguments: Sequence[str] | None = None) -> int:
    job_text, *limit = sys.argv[1:] if arguments is None else arguments
    # Libraries write to file descriptor 1 as they please; give them standard error and keep the real one.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = Job.from_dict(json.loads(job_text))
    device = torch.device(job.device)
    if limit and device.type == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit[0]), int(limit[0])))
    row = Row(job, round=0, measurement=measure(job), machine=describe_machine(device))
    print(row.to_json(), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
