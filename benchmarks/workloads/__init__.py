"""What every peer runs: weights, inputs and one step, all from the job's seed."""

from benchmarks.records import Job
from benchmarks.workloads.base import Workload
from benchmarks.workloads.layer import build_gradients_workload, build_layer_workload
from benchmarks.workloads.model import build_model_workload
from benchmarks.workloads.rank import build_rank_workload

__all__ = ["BUILDERS", "Workload", "build_workload"]

BUILDERS = {
    "layer": build_layer_workload,
    "gradients": build_gradients_workload,
    "model": build_model_workload,
    "rank": build_rank_workload,
}


def build_workload(job: Job) -> Workload:
    return BUILDERS[job.workload](job)
