"""docs/models.md: the longest sequences that known models train with, by memory. `python -m benchmarks.models_page`.

Each model is asked of `fit` for full training and for LoRA in bf16 with AdamW, one sequence a step, on one device: with
memfine_fx under the smallest budget, and as torch.compile takes it with gradient checkpointing of every layer. Where
parameters, gradients and optimizer state alone exceed the largest memory, nothing is recorded. Answers are kept in
results/fit_models.jsonl; what is there is not asked again, so the command may be stopped and goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.known_models import KNOWN_MODELS, known_config
from memfine_fx.config import Config
from memfine_fx.fitting.analysis import Analysis
from memfine_fx.fitting.answer import analyse, analysed_plainly, static_bytes
from memfine_fx.fitting.cuda_terms import CUDA_TERMS
from memfine_fx.fitting.setup import Setup, Train
from memfine_fx.plan.rows import largest

__all__ = ["MEMORIES", "main", "page"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fit_models.jsonl"
MEMORIES = (24, 48, 80, 141, 192)
"""GB of 10^9 bytes."""
TRAINS: tuple[Train, ...] = ("full", "lora")
_MOST_TOKENS = 1 << 22
_HEAD = """# Which models train on which device

Written by `python -m benchmarks.models_page` from answers of `memfine fit`, which are kept in
benchmarks/results/fit_models.jsonl. **No number here was measured on a GPU**: sizes of kernels are those of a CPU, and
what CUDA takes beside a step is counted as stated constants. Each cell is the longest sequence, in tokens, of one
sequence a step in bf16 with AdamW (bf16 state, no fp32 copies) on one device: with memfine_fx under the smallest budget
/ as torch.compile takes the model with gradient checkpointing of every layer. A dash: not even two tokens. Memory is in
GB of 10^9 bytes. LoRA has rank 16 on every linear layer but the head, by PEFT's own choice of targets. One expert is
supposed to get a row of every token, the worst that routing can do. The logits of a model that returns them beside its
loss stay whole on both sides. The plain step is read from the graph's operations, and is an estimate where its layers
were not found to keep the same. Sizes of models are from memory; benchmarks/known_models.py says which were compared.
Of {known} models {asked} of {all} rows were asked so far, the others were not. LoRA on 4-bit weights is not asked:
`fit` has none. **Where a cell is shorter with memfine_fx** (GPT-OSS, Qwen1.5-MoE), checkpoints of whole layers keep
less than its plans that treat layers alike, which drop such checkpoints for a budget; chunked experts inside
checkpointed layers, without a budget, were not asked.

"""
_BEYOND = """
**What no sequence fits**, on one device of 192 GB: parameters alone are more, in full training with gradients and
optimizer state. `--fsdp` and `--expert-parallel` of `memfine fit` ask for several ranks. What each needs at least:

"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models_page", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=KNOWN_MODELS, default=list(KNOWN_MODELS))
    parser.add_argument("--train", nargs="+", choices=TRAINS, default=list(TRAINS))
    options = parser.parse_args(arguments)
    known = {(row["model"], row["train"]) for row in _rows()}
    for model in options.models:
        for train in options.train:
            if (model, train) not in known:
                row = asked(model, train)
                print(json.dumps(row), flush=True)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    (ROOT / "docs" / "models.md").write_text(page(_rows()), encoding="utf-8")
    return 0


def asked(model: str, train: Train) -> dict[str, Any]:
    """One row of the file: longest sequences by memory, with and without us."""
    started = time.process_time()
    setup, config = Setup(seq=8192, train=train, device="cuda"), known_config(model)
    static = static_bytes(config, Setup(seq=8192))
    floor = static.parameters + (static.trained + static.optimizer.state if train == "full" else 0)
    if floor > MEMORIES[-1] * 10**9:
        none = {str(memory): 0 for memory in MEMORIES}
        row = {"model": model, "train": train, "parameter_bytes": static.parameters, "with": none, "without": none}
        return {**row, "floor_bytes": floor, "cpu_seconds": round(time.process_time() - started, 1)}
    ours, _ = analyse(config, setup, Config())
    theirs = analysed_plainly(config, dataclasses.replace(setup, checkpointing=True), Config())
    return {
        "model": model,
        "train": train,
        "parameter_bytes": ours.static.parameters,
        "with": {str(memory): _longest(ours, "least", memory) for memory in MEMORIES},
        "without": {str(memory): _longest(theirs, "asked", memory) for memory in MEMORIES},
        "least_bytes_at_8192": ours.total("least", 1, setup.seq).num_bytes,
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def _longest(analysis: Analysis, plan: str, memory: int) -> int:
    available = memory * 10**9 - sum(term.num_bytes for term in CUDA_TERMS)

    def fits(seq: int) -> bool:
        return analysis.total(plan, 1, seq).num_bytes <= available

    return largest(2, _MOST_TOKENS + 1, fits) if fits(2) else 0


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The page of these rows, models by size."""
    lines = ["| model | weights | training | " + " | ".join(f"{memory} GB" for memory in MEMORIES) + " |"]
    lines.append("|---|---|---|" + "---|" * len(MEMORIES))
    places = list(KNOWN_MODELS)
    ordered = sorted(rows, key=lambda one: (places.index(one["model"]), one["train"]))
    beyond = [row for row in ordered if "floor_bytes" in row]
    for row in (row for row in ordered if "floor_bytes" not in row):
        cells = [f"{_shown(row['with'][str(one)])} / {_shown(row['without'][str(one)])}" for one in MEMORIES]
        weights = f"{row['parameter_bytes'] / 1e9:.1f} GB"
        lines.append(f"| {row['model']} | {weights} | {row['train']} | " + " | ".join(cells) + " |")
    counted = {"known": len(KNOWN_MODELS), "asked": len(rows), "all": len(KNOWN_MODELS) * len(TRAINS)}
    text = _HEAD.format(**counted) + "\n".join(lines) + "\n"
    return text + _BEYOND + _beyond(beyond) if beyond else text


def _beyond(rows: Sequence[dict[str, Any]]) -> str:
    """Models beyond every memory, with the bytes that they take without a token."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        found.setdefault(row["model"], {})[row["train"]] = row["floor_bytes"]
    lines = ["| model | " + " | ".join(TRAINS) + " |", "|---|" + "---|" * len(TRAINS)]
    for model, floors in found.items():
        cells = [f"{floors[train] / 1e9:,.0f} GB" if train in floors else "" for train in TRAINS]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _shown(seq: int) -> str:
    if seq >= _MOST_TOKENS:
        return f"{_MOST_TOKENS:,} or more"
    return f"{seq:,}" if seq else "-"


def _rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []


if __name__ == "__main__":
    sys.exit(main())
