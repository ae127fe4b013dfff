"""Which share of a step do reporting and logging in every step take?

A Qwen3-MoE of 4 layers, T=2048, Inductor, forward, backward and AdamW. After each step `memfine_fx.report` is asked and
`memfine_fx.log_scalars` writes to a TensorBoard event file; both are timed beside the step, medians of all steps. The
counting of loads is part of every step, logged or not, and of its time.
"""

import statistics
import tempfile
from collections.abc import Callable

import torch

import memfine_fx
from benchmarks.machine import seconds_of
from benchmarks.measures import Answer, device_here
from memfine_fx.demo.training import ModelSizes, build_causal_lm

SIZES = ModelSizes(
    layers=4, hidden=512, width=512, experts=16, top_k=4, heads=8, kv_heads=4, head_dim=64, vocab=2048, positions=1024
)
TARGET = 0.01
_WARM_STEPS = 3


def measure(steps: int = 15) -> Answer:
    from torch.utils.tensorboard import SummaryWriter

    device = device_here()
    model = memfine_fx.optimize(build_causal_lm(SIZES, seed=0, dtype=torch.float32, device=device))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(SIZES.vocab, (2, 1024), device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        calls: list[Callable[[], object]] = [
            step,
            lambda: memfine_fx.report(model),
            lambda: memfine_fx.log_scalars(writer, model, len(seconds)),
        ]
        seconds: list[list[float]] = []
        for _ in range(_WARM_STEPS + steps):
            seconds.append([seconds_of(call, device) for call in calls])
    of_step, of_report, of_log = map(statistics.median, zip(*seconds[_WARM_STEPS:], strict=True))
    share = (of_report + of_log) / of_step
    row = {
        "regions": memfine_fx.report(model).num_chunked,
        "step_seconds": round(of_step, 4),
        "report_seconds": round(of_report, 6),
        "log_seconds": round(of_log, 6),
        "share": round(share, 5),
    }
    return Answer(row=row, is_met=share < TARGET)
