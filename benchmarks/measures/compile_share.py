"""Which share of a cold compile do reading, checking and comparing take?

The 4-layer Qwen3-MoE of the demo, T=512, Inductor with empty caches. The compile is the first step less the median of
later ones; the stages are timed where they run (`Diagnostics.stage_seconds`).
"""

import os
import statistics
import tempfile
from unittest import mock

import torch

import memfine_fx
from benchmarks.machine import seconds_of
from benchmarks.measures import Answer, device_here
from memfine_fx.compiler.sessions import sessions
from memfine_fx.demo.training import ModelSizes, build_causal_lm

SIZES = ModelSizes(
    layers=4, hidden=256, width=128, experts=16, top_k=4, heads=4, kv_heads=2, head_dim=64, vocab=2048, positions=1024
)
TARGET = 0.15
CHECK_TARGET = 0.02
"""Of comparing gradients (`passes.verify.gradient_check`), and of comparing with the model's own code
(`compiler.own_code`)."""
COMPARE_SECONDS = 0.5
"""Enough for a kind of layer, whatever share that is; the model has one kind."""


def measure() -> Answer:
    device = device_here()
    model = build_causal_lm(SIZES, seed=0, dtype=torch.float32, device=device)
    memfine_fx.optimize(model)
    tokens = torch.randint(SIZES.vocab, (2, 256), device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    with tempfile.TemporaryDirectory() as caches, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=caches):
        first, *later = (seconds_of(step, device) for _ in range(4))
    compile_seconds = first - statistics.median(later)
    stages = sessions()[-1].diagnostics.stage_seconds
    share, check, compare = (stages[name] / compile_seconds for name in ("read", "check", "compare"))
    row = {
        "regions": memfine_fx.report(model).num_chunked,
        "compile_seconds": round(compile_seconds, 3),
        "stage_seconds": {name: round(seconds, 3) for name, seconds in stages.items()},
        "share_of_reading": round(share, 4),
        "share_of_check": round(check, 4),
        "share_of_compare": round(compare, 4),
    }
    is_cheap = compare < CHECK_TARGET or stages["compare"] < COMPARE_SECONDS
    return Answer(row=row, is_met=share < TARGET and check < CHECK_TARGET and is_cheap)
