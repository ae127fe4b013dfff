"""What reporting and logging in every step cost: ``python -m benchmarks.report_overhead``, one JSON line.

A Qwen3-MoE of 4 layers, T=2048, Inductor, forward, backward and AdamW. After each step `memfine_fx.report` is asked and
`memfine_fx.log_scalars` writes to a TensorBoard event file; both are timed beside the step, medians of all steps. The
counting of loads is part of every step, logged or not, and of its time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "report_overhead.jsonl"
TARGET = 0.01


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--keep", action="store_true", help=f"append the line to {RESULTS.name}")
    options = parser.parse_args(arguments)
    row = measure(options.steps)
    line = json.dumps(row)
    print(line)
    if options.keep:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    return 0 if float(row["share"]) < TARGET else 1  # type: ignore[arg-type]  # a float


def measure(num_steps: int) -> dict[str, object]:
    """Median seconds of a step, of a report and of logging, and the two's share of the step."""
    import torch
    from torch.utils.tensorboard import SummaryWriter

    import memfine_fx
    from benchmarks.machine import describe_machine
    from memfine_fx.demo.model import ModelSizes, build_causal_lm

    cpu = torch.device("cpu")
    sizes = ModelSizes(
        layers=4, hidden=512, width=512, experts=16, top_k=4, heads=8, kv_heads=4, head_dim=64, vocab=2048,
        positions=1024,
    )  # fmt: skip
    model = memfine_fx.optimize(build_causal_lm(sizes, seed=0, dtype=torch.float32, device=cpu))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(sizes.vocab, (2, 1024))
    seconds: dict[str, list[float]] = {"step": [], "report": [], "log": []}

    def timed(name: str, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        seconds[name].append(time.perf_counter() - started)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        for number in range(num_steps + 3):
            timed("step", step)
            timed("report", lambda: memfine_fx.report(model))
            timed("log", lambda number=number: memfine_fx.log_scalars(writer, model, number))  # type: ignore[misc]
    medians = {name: statistics.median(values[3:]) for name, values in seconds.items()}
    return {
        "regions": memfine_fx.report(model).num_chunked,
        "steps": num_steps,
        "step_seconds": round(medians["step"], 4),
        "report_seconds": round(medians["report"], 6),
        "log_seconds": round(medians["log"], 6),
        "share": round((medians["report"] + medians["log"]) / medians["step"], 5),
        "machine": str(describe_machine(cpu)),
    }


if __name__ == "__main__":
    sys.exit(main())
