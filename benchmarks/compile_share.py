"""How much of a cold compile finding, raising and checking take: ``python -m benchmarks.compile_share``, one JSON line.

The 4-layer Qwen3-MoE of the demo, T=512, Inductor with empty caches, in this fresh process. The compile is the first
step less the median of later ones; the stages are timed where they run (`Session.stage_seconds`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "compile_share.jsonl"
TARGET = 0.15
CHECK_TARGET = 0.02
"""Of comparing gradients, see `passes.verify.gradient_check`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_share", description=__doc__)
    parser.add_argument("--keep", action="store_true", help=f"append the line to {RESULTS.name}")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as caches:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        row = _measure()
    line = json.dumps(row)
    print(line)
    if options.keep:
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    is_met = row["share_of_find_and_raise"] < TARGET and row["share_of_check"] < CHECK_TARGET  # type: ignore[operator]  # floats
    return 0 if is_met else 1


def _measure() -> dict[str, object]:
    import torch

    import memfine_fx
    from benchmarks.machine import describe_machine
    from memfine_fx.compiler.session import sessions
    from memfine_fx.demo.model import ModelSizes, build_causal_lm

    cpu = torch.device("cpu")
    sizes = ModelSizes(
        layers=4, hidden=256, width=128, experts=16, top_k=4, heads=4, kv_heads=2, head_dim=64, vocab=2048,
        positions=1024,
    )  # fmt: skip
    model = build_causal_lm(sizes, seed=0, dtype=torch.float32, device=cpu)
    memfine_fx.optimize(model)
    tokens = torch.randint(sizes.vocab, (2, 256))

    def step() -> float:
        started = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return time.perf_counter() - started

    first = step()
    compile_seconds = first - statistics.median(step() for _ in range(3))
    stages = dict(sessions()[-1].stage_seconds)
    analysis = stages["find"] + stages["raise"]
    return {
        "regions": memfine_fx.report(model).num_chunked,
        "compile_seconds": round(compile_seconds, 3),
        "stage_seconds": {name: round(seconds, 3) for name, seconds in stages.items()},
        "share_of_find_and_raise": round(analysis / compile_seconds, 4),
        "share_of_check": round(stages["check"] / compile_seconds, 4),
        "machine": str(describe_machine(cpu)),
    }


if __name__ == "__main__":
    sys.exit(main())
