"""The throughput knee: time of one layer's step against rows per chunk, ``python -m benchmarks.knee``.

One process and one compilation: rows per chunk is a run-time value, so only the plan changes between steps.
Rounds go through all chunk sizes in turn; medians are printed.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch

import memfine_fx
from benchmarks.machine import describe_machine
from memfine_fx.models import MixtralConfig, MixtralMoE
from memfine_fx.runtime.store import LiveRegion
from memfine_fx.session import LoweredRegion, sessions

ROWS = (64, 128, 256, 512, 1024, 2048, 4096)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.knee", description=__doc__.split("\n")[0])
    for name, default in (("tokens", 8192), ("hidden", 512), ("width", 1024), ("experts", 16), ("top-k", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds = sweep(options, device)
    print(f"{describe_machine(device)}, {options.dtype}, T={options.tokens} H={options.hidden} F={options.width}")
    for rows, times in seconds.items():
        print(f"R={rows:6d}  median {statistics.median(times):.4f} s  min {min(times):.4f} s")
    return 0


def sweep(options: argparse.Namespace, device: torch.device) -> dict[int, list[float]]:
    """Step times by rows per chunk."""
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    config = MixtralConfig(options.hidden, options.width, options.experts, options.top_k, spelling="gathered")
    layer = memfine_fx.optimize(MixtralMoE(config).to(device, dtype))
    hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)

    def step() -> float:
        layer.zero_grad()
        started = time.perf_counter()
        layer(hidden).backward(hidden.detach())
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    step()
    live = _live_region()
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(options.rounds):
        for rows in ROWS:
            assert live.plan is not None
            live.use_plan(options.tokens, replace(live.plan, rows_per_chunk=rows))
            seconds[rows].append(step())
    return seconds


def _live_region() -> LiveRegion:
    return next(o.live for s in sessions() for o in s.outcomes if isinstance(o, LoweredRegion))


if __name__ == "__main__":
    sys.exit(main())
