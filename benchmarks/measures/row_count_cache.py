"""How many bytes do the CPU's caches of matmuls hold, one entry per row count, and what does a limit cost?

A weight [768,512] is multiplied with 1 to 600 rows in turn, as experts get a different number of rows in each
step, in a fresh process without and with limits of 32 entries for both caches, oneDNN's and PyTorch's (`LIMITS`). Bytes
are the process's resident memory, since no allocator of PyTorch's counts them. Seconds are those of a second round.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.measures import Answer, Dtype

LIMITS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
_ROWS, _IN, _OUT = 600, 512, 768
_LEAST_RATIO = 4.0


def measure(dtype: Dtype = "bfloat16") -> Answer:
    """The limits are worth it in bf16, for which oneDNN caches; in fp32 there is little to limit."""
    without, limited = _in_fresh_process(dtype, {}), _in_fresh_process(dtype, LIMITS)
    row = {
        "dtype": dtype,
        "row_counts": _ROWS,
        "unlimited_bytes": without["bytes"],
        "limited_bytes": limited["bytes"],
        "limited_to_unlimited_seconds": round(limited["seconds"] / without["seconds"], 3),
    }
    return Answer(row=row, is_met=dtype != "bfloat16" or without["bytes"] > _LEAST_RATIO * limited["bytes"])


def _in_fresh_process(dtype: Dtype, limits: dict[str, str]) -> dict[str, float]:
    code = f"from benchmarks.measures.row_count_cache import multiply; multiply({dtype!r})"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env={**os.environ, **limits}, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(result.stdout)
    return measured


def multiply(dtype: Dtype) -> None:
    """Print the resident bytes that a first round of all row counts adds, and the seconds of a second one, as JSON."""
    torch.set_num_threads(1)
    weight, rows = (torch.randn(count, _IN).to(getattr(torch, dtype)) for count in (_OUT, _ROWS))
    before = _resident_bytes()
    for count in range(1, _ROWS + 1):
        rows[:count] @ weight.t()
    held = _resident_bytes() - before
    began = time.perf_counter()
    for count in range(1, _ROWS + 1):
        rows[:count] @ weight.t()
    print(json.dumps({"bytes": held, "seconds": time.perf_counter() - began}))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
