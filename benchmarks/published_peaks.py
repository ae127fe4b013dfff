"""Peaks that others measured on GPUs, beside what `fit` says of the same step without us. `python -m
benchmarks.published_peaks` asks `fit`; published_peaks.json has the rows as they were read, on 2026-11-23.

A row is compared where its source states what `fit` needs: model, batch, sequence, and ranks that `fit` knows. What it
leaves open stands in the row, and a number of `fit` is that of the step as torch.compile takes it, plain and with
gradient checkpointing of every layer, with what CUDA takes beside a step left out: frameworks report what PyTorch's
allocator gave. `gib` is the stated number; "stated" says where it was given in GB, which are taken for 10^9 bytes.
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

from benchmarks.known_models import known_config
from memfine_fx.config import Config
from memfine_fx.fitting.analysis import Analysis
from memfine_fx.fitting.answer import analysed_plainly, with_setup
from memfine_fx.fitting.setup import Setup

__all__ = ["main", "rows"]

ROWS = Path(__file__).parent / "published_peaks.json"
RESULTS = Path(__file__).parent / "results" / "published_peaks.jsonl"
_MINI: dict[str, Any] = dict(
    num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=16, num_experts_per_tok=2, n_group=2, topk_group=1,
    routed_scaling_factor=1.0,
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """What was read, in the order of the file."""
    found: list[dict[str, Any]] = json.loads(ROWS.read_text(encoding="utf-8"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.published_peaks", description=__doc__).parse_args(arguments)
    known: dict[tuple[str, bool], Analysis] = {}
    lines = [json.dumps(_compared(row, known)) for row in rows() if "fit" in row]
    RESULTS.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print("\n".join(lines))
    print(f"{len(lines)} of {len(rows())} rows state what is needed to be compared")
    return 0


def _compared(row: dict[str, Any], known: dict[tuple[str, bool], Analysis]) -> dict[str, Any]:
    started = time.process_time()
    model, setup = row["fit"]["model"], Setup(**row["fit"]["setup"], device="cuda")
    said = {}
    for name, checkpointing in (("plain", False), ("checkpointing", True)):
        asked = dataclasses.replace(setup, checkpointing=checkpointing)
        if (model, checkpointing) not in known:
            known[model, checkpointing] = analysed_plainly(_config(model), asked, Config())
        analysis = with_setup(_config(model), known[model, checkpointing], asked)
        said[f"{name}_gib"] = round(analysis.total("asked", setup.batch, setup.seq).num_bytes / 2**30, 2)
    shown = {name: row[name] for name in ("what", "device", "gib", "source")}
    return {**shown, **said, "cpu_seconds": round(time.process_time() - started, 1)}


def _config(model: str) -> Any:
    if model != "mini-deepseek-v3":
        return known_config(model)
    config = known_config("DeepSeek-V3")
    return type(config)(**{**config.to_dict(), **_MINI})


if __name__ == "__main__":
    sys.exit(main())
