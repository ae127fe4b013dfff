"""The throughput knee: time of one layer's step against rows per chunk, ``python -m benchmarks.knee``.

One process and one compilation: rows per chunk is a run-time value, so only the plan changes between steps.
"""

import argparse
import sys
import time
from dataclasses import replace

import torch

import memfine_fx
from benchmarks.machine import synchronize
from benchmarks.row_sweep import Timed, main_of
from memfine_fx.compiler.captured_graph import LoweredRegion
from memfine_fx.compiler.session import sessions
from memfine_fx.models import MixtralConfig, MixtralMoE
from memfine_fx.runtime.store import LiveRegion

ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
SIZES = {"tokens": 8192, "hidden": 512, "width": 1024, "experts": 16, "top-k": 4}


def prepare(options: argparse.Namespace, device: torch.device) -> Timed:
    """A step of one layer."""
    dtype = getattr(torch, options.dtype)
    config = MixtralConfig(options.hidden, options.width, options.experts, options.top_k, spelling="gathered")
    layer = memfine_fx.optimize(MixtralMoE(config).to(device, dtype))
    hidden = torch.randn(options.tokens, options.hidden, device=device, dtype=dtype, requires_grad=True)

    def step() -> float:
        layer.zero_grad()
        started = time.perf_counter()
        layer(hidden).backward(hidden.detach())
        synchronize(device)
        return time.perf_counter() - started

    def timed(rows: int) -> float:
        assert live.plan is not None
        live.use_plan(options.tokens, replace(live.plan, rows_per_chunk=rows))
        return step()

    step()
    live = _live_region()
    return timed


def _live_region() -> LiveRegion:
    return next(o.live for s in sessions() for o in s.outcomes if isinstance(o, LoweredRegion))


if __name__ == "__main__":
    sys.exit(main_of("knee", __doc__, SIZES, ROWS, prepare))
