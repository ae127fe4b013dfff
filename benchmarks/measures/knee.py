"""Where does a layer's step stop getting faster as its chunks have more rows?

One process and one compilation: rows per chunk is a run-time value, so only the plan changes between steps.
"""

from dataclasses import replace

import torch

import memfine_fx
from benchmarks.machine import seconds_of
from benchmarks.measures import Answer, Dtype, chunk_sweep, device_here
from memfine_fx.compiler.session import LoweredRegion
from memfine_fx.compiler.sessions import sessions
from memfine_fx.models import MixtralConfig, MixtralMoE

ROWS = (64, 128, 256, 512, 1024, 2048, 4096)


def measure(
    tokens: int = 8192,
    hidden: int = 512,
    width: int = 1024,
    experts: int = 16,
    top_k: int = 4,
    dtype: Dtype = "float32",
    rounds: int = 3,
) -> Answer:
    torch.manual_seed(0)
    device = device_here()
    config = MixtralConfig(hidden, width, experts, top_k, spelling="gathered")
    layer = memfine_fx.optimize(MixtralMoE(config).to(device, getattr(torch, dtype)))
    rows = torch.randn(tokens, hidden, device=device, dtype=getattr(torch, dtype), requires_grad=True)

    def step() -> None:
        layer(rows).backward(rows.detach())

    def timed(rows_per_chunk: int) -> float:
        assert live.plan is not None
        live.use_plan(tokens, replace(live.plan, rows_per_chunk=rows_per_chunk))
        layer.zero_grad()
        return seconds_of(step, device)

    step()
    live = next(one.live for session in sessions() for one in session.outcomes if isinstance(one, LoweredRegion))
    return chunk_sweep(ROWS, timed, rounds)
