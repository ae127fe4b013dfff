"""The throughput knee of a head: time of loss and gradients by tokens per chunk, ``python -m benchmarks.head_knee``.

One process; rounds go through all chunk sizes in turn, medians are printed.
"""

import argparse
import statistics
import sys
import time

import torch

from benchmarks.machine import describe_machine, synchronize
from memfine_fx.head_records import HeadLoss
from memfine_fx.runtime.head_loop import HeadInputs, chunk_bounds, run_head

ROWS = (32, 64, 128, 256, 512, 1024)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head_knee", description=__doc__.split("\n")[0])
    for name, default in (("tokens", 1024), ("hidden", 512), ("vocab", 131072), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds = sweep(options, device)
    print(f"{describe_machine(device)}, {options.dtype}, T={options.tokens} H={options.hidden} V={options.vocab}")
    for rows, times in seconds.items():
        print(f"R={rows:6d}  median {statistics.median(times):.4f} s  min {min(times):.4f} s")
    return 0


def sweep(options: argparse.Namespace, device: torch.device) -> dict[int, list[float]]:
    """Times by tokens per chunk, after one that warms up."""
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, device=device).to(dtype)
    weight = (torch.randn(options.vocab, options.hidden, device=device) / options.hidden**0.5).to(dtype)
    labels = torch.randint(options.vocab, (options.tokens,), device=device)
    inputs = HeadInputs(hidden, weight, None, labels, None)

    def timed(rows: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        run_head(inputs, HeadLoss(), chunk_bounds(options.tokens, rows), (True, True, False))
        synchronize(device)
        return time.perf_counter() - started

    timed(ROWS[-1])
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(options.rounds):
        for rows in ROWS:
            seconds[rows].append(timed(rows))
    return seconds


if __name__ == "__main__":
    sys.exit(main())
