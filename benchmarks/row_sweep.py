"""Time against rows per chunk in one process: what the two knees (`knee`, `head_knee`) have in common."""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.machine import describe_machine

__all__ = ["Timed", "main_of"]

Timed = Callable[[int], float]
"""Seconds of one run with so many rows a chunk."""


def main_of(
    name: str,
    doc: str,
    sizes: Mapping[str, int],
    rows: Sequence[int],
    prepare: Callable[[argparse.Namespace, torch.device], Timed],
) -> int:
    """Sweep as the command line asks: rounds go through all chunk sizes in turn, medians are printed.

    Args:
        name: of the module in `benchmarks`.
        doc: its docstring.
        sizes: options of the command line and what they are by default.
        rows: chunk sizes.
        prepare: makes what is timed, warm, from the options.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.split("\n")[0])
    for size, default in sizes.items():
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    timed = prepare(options, device)
    seconds = [[timed(one) for one in rows] for _ in range(options.rounds)]
    given = " ".join(f"{size}={getattr(options, size.replace('-', '_'))}" for size in sizes)
    print(f"{given}, {options.dtype}; {describe_machine(device)}")
    for one, times in zip(rows, zip(*seconds, strict=True), strict=True):
        print(f"R={one:6d}  median {statistics.median(times):.4f} s  min {min(times):.4f} s")
    return 0
