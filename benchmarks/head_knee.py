"""The throughput knee of a head: time of loss and gradients by tokens per chunk, ``python -m benchmarks.head_knee``."""

import argparse
import sys
import time

import torch

from benchmarks.machine import synchronize
from benchmarks.row_sweep import Timed, main_of
from memfine_fx.records.heads import HeadLoss
from memfine_fx.runtime.head_loop import HeadInputs, chunk_bounds, run_head

ROWS = (32, 64, 128, 256, 512, 1024)
SIZES = {"tokens": 1024, "hidden": 512, "vocab": 131072}


def prepare(options: argparse.Namespace, device: torch.device) -> Timed:
    """Loss and gradients of one head, after one run that warms up."""
    dtype = getattr(torch, options.dtype)
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
    return timed


if __name__ == "__main__":
    sys.exit(main_of("head_knee", __doc__, SIZES, ROWS, prepare))
