"""What does `experts_implementation="memfine"` cost one layer, against "grouped_mm"?

The layer of suite `layer`, fp32. Both take turns, warm; bytes are beyond parameters and gradients. The first step's
seconds are those of fresh processes, a small model after its imports, the median of several; both take turns. Modules
have their bytecode, as pip writes it when it installs a package.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch

from benchmarks.measures import Answer
from benchmarks.measuring import BUILDERS, time_step
from benchmarks.records import Job
from benchmarks.suites.layer import FULL
from memfine_fx.memory.measure import trace_memory

_PEERS = ("eager", "memfine-function")
_MOST_MEMORY, _MOST_TIME, _MOST_FIRST_STEP = 0.25, 1.05, 1.0


def measure(rounds: int = 9, processes: int = 3) -> Answer:
    """At most 0.25 of grouped_mm's memory and 1.05 of its time; a first step at most a second longer than eager's."""
    device = torch.device("cpu")
    jobs = [Job("layer", "layer", peer, FULL, "float32", device.type, seed=0, steps=rounds) for peer in _PEERS]
    workloads = {job.peer: BUILDERS[job.kind](job) for job in jobs}
    for workload in workloads.values():
        time_step(workload, device)
    seconds = [{peer: time_step(workload, device) for peer, workload in workloads.items()} for _ in range(rounds)]
    peaks = {}
    for peer, workload in workloads.items():
        workload.drop_gradients()
        peaks[peer] = trace_memory(workload.step, device, beyond=workload.gradients).peak_bytes
    first = _first_steps(("eager", "memfine"), processes)
    eager, ours = _PEERS
    row = {
        "sizes": str(FULL),
        "peak_bytes": peaks,
        "memory_of_grouped_mm": round(peaks[ours] / peaks[eager], 3),
        "time_of_grouped_mm": round(statistics.median(step[ours] / step[eager] for step in seconds), 3),
        "first_step_seconds": first,
    }
    is_met = row["memory_of_grouped_mm"] <= _MOST_MEMORY and row["time_of_grouped_mm"] <= _MOST_TIME
    return Answer(row=row, is_met=is_met and first["memfine"] - first["eager"] <= _MOST_FIRST_STEP)


def _first_steps(implementations: Sequence[str], processes: int) -> dict[str, float]:
    """Return the median seconds of a first step by each implementation."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = folder

        def seconds(implementation: str) -> float:
            code = f"from benchmarks.measures.experts_function import first_step; first_step({implementation!r})"
            run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
            return float(json.loads(run.stdout.splitlines()[-1]))

        for implementation in implementations:
            seconds(implementation)  # writes the bytecode
        rounds = [{name: seconds(name) for name in implementations} for _ in range(processes)]
        return {name: round(statistics.median(each[name] for each in rounds), 3) for name in implementations}


def first_step(implementation: str) -> None:
    """Print the seconds of the first forward and backward of a small Qwen3-MoE, as JSON."""
    from memfine_fx.demo.tiny import tiny_causal_lm

    model = tiny_causal_lm("qwen3_moe", num_hidden_layers=4)
    model.set_experts_implementation(implementation)
    tokens = torch.randint(1, 64, (2, 64))
    began = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    print(json.dumps(time.perf_counter() - began))
