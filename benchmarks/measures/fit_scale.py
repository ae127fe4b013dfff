"""How long does `fit` take for a large model, and how much memory?"""

import resource
import time

import memfine_fx
from benchmarks.known_models import known_config
from benchmarks.measures import Answer


def measure(model: str = "Qwen3-30B-A3B", seq: int = 8192, train: str = "full") -> Answer:
    wall, cpu = time.perf_counter(), time.process_time()
    report = memfine_fx.fit(known_config(model), memory="80GiB", seq=seq, train=train, device="cuda")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    row = {
        "parameters": report.model,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "least_bytes": report.least.num_bytes,
        "most_bytes": report.most.num_bytes,
        "how": report.how,
    }
    return Answer([str(report)], row)
