"""docs/models.md: the longest sequences that known models train with, by memory. `python -m benchmarks.models_page`.

Each model is asked of `fit` for full training, LoRA and QLoRA in bf16 with AdamW, one sequence a step, on one device,
in three ways (`WAYS`): with memfine_fx under the smallest budget; with memfine_fx and gradient checkpointing of every
layer; as torch.compile takes it with such checkpointing. Where weights, gradients and optimizer state alone exceed the
largest memory, nothing is recorded. Each answer is a line of results/fit_models.jsonl with the commit that gave it;
what is there is not asked again, so the command may be stopped and goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.known_models import KNOWN_MODELS, known_config
from benchmarks.models_figure import draw
from memfine_fx.config import Config
from memfine_fx.fitting.analysis import Analysis
from memfine_fx.fitting.answer import analyse, analysed_plainly, static_bytes
from memfine_fx.fitting.devices import CUDA_TERMS
from memfine_fx.fitting.setup import TRAININGS, Setup, Train
from memfine_fx.plan.solve import largest

__all__ = ["MEMORIES", "WAYS", "longest_with", "main", "merged", "page"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fit_models.jsonl"
MEMORIES = (24, 48, 80, 141, 192)
"""GB of 10^9 bytes."""
TRAINS: tuple[Train, ...] = ("full", "lora", "qlora")
WAYS = ("with", "with_checkpoints", "without")
"""With memfine_fx under the smallest budget, with it inside checkpointed layers, without it in checkpointed layers."""
_MOST_TOKENS = 1 << 22
_HEAD = """# Which models train on which device

Written by `python -m benchmarks.models_page` from answers of `memfine fit` (benchmarks/results/fit_models.jsonl).
**These are predictions; no number here was measured on a GPU.** Each cell is the longest sequence in tokens, one
sequence a step: with memfine_fx / under torch.compile with gradient checkpointing of every layer. A dash: no sequence
fits. A question mark: not asked. A "c": memfine_fx without a budget inside checkpointed layers; else under the smallest
budget.

- bf16 with AdamW (bf16 state, no fp32 copies), memory in GB of 10^9 bytes. Kernel sizes are those of a CPU, and what
  CUDA takes beside a step is a stated constant.
- LoRA has rank 16 on every linear layer but the head; QLoRA has NF4 weights under it.
- Routing is the worst case: one expert gets a row of every token. Returned logits exist whole on both sides.
- Older answers are shorter than today's where a step peaks at its head.
- Sizes of models are from memory; benchmarks/known_models.py says which were compared. Of {known} models {asked} of
  {all} rows were asked.

![Longest sequences by model and memory](models.svg)

"""
_PARTIAL = """
**Asked under a budget alone**, not yet inside checkpointed layers, where the sequence may be longer: {rows}.
"""
_BEYOND = """
**What no sequence fits** on one device of 192 GB, and what it needs at least without a token. `memfine fit --fsdp` and
`--expert-parallel` ask for several ranks.

"""
_OLD = "an older one, before answers were kept with their commit"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models_page", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=KNOWN_MODELS, default=list(KNOWN_MODELS))
    parser.add_argument("--train", nargs="+", choices=TRAINS, default=list(TRAINS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args(arguments)
    for model in options.models:
        for train in options.train:
            for line in _missing(model, train, options.ways):
                print(json.dumps(line), flush=True)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    rows = _lines()
    (ROOT / "docs" / "models.md").write_text(page(rows), encoding="utf-8")
    draw(merged(rows), ROOT / "docs" / "models.svg")
    return 0


def merged(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each model and training, models by size; later lines win."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        row = rows.setdefault((line["model"], line["train"]), {"codes": {}})
        row |= {name: value for name, value in line.items() if name != "code"}
        row["codes"] |= dict.fromkeys((way for way in WAYS if way in line), line.get("code", ""))
    places = list(KNOWN_MODELS)
    return sorted(rows.values(), key=lambda one: (places.index(one["model"]), TRAINS.index(one["train"])))


def _missing(model: str, train: Train, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Lines for what the file lacks of one row."""
    known: dict[str, Any] = next(
        (row for row in merged(_lines()) if (row["model"], row["train"]) == (model, train)), {}
    )
    if "floor_bytes" in known or all(way in known for way in ways):
        return
    about = {"model": model, "train": train, "code": _code()}
    floor, weights = _floor(model, train)
    if floor > MEMORIES[-1] * 10**9:
        yield {**about, "parameter_bytes": weights, "floor_bytes": floor}
        return
    for way in ways:
        if way not in known:
            yield {**about, **_asked(model, train, way)}


def _floor(model: str, train: Train) -> tuple[int, int]:
    """What is there without a token, and the weights of it."""
    static = static_bytes(known_config(model), Setup(seq=8192, train=train))
    return static.parameters + static.trained + static.optimizer.state, static.parameters


def _asked(model: str, train: Train, way: str) -> dict[str, Any]:
    """The longest sequence by memory, in one way."""
    started = time.process_time()
    setup = Setup(seq=8192, train=train, device="cuda", checkpointing=way != "with")
    config = known_config(model)
    plain = way == "without"
    analysis = analysed_plainly(config, setup, Config()) if plain else analyse(config, setup, Config())[0]
    return {
        "parameter_bytes": analysis.static.parameters,
        way: {str(memory): _longest(analysis, plain, memory) for memory in MEMORIES},
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def _longest(analysis: Analysis, plain: bool, memory: int) -> int:
    available = memory * 10**9 - sum(term.num_bytes for term in CUDA_TERMS)

    def fits(seq: int) -> bool:
        total = analysis.total("asked", 1, seq) if plain else analysis.lightest(1, seq)
        return total.num_bytes <= available

    return largest(2, _MOST_TOKENS + 1, fits) if fits(2) else 0


def _code() -> str:
    """The commit that answers, with a sign where files differ from it."""
    changed = _git("status", "--porcelain", "--", "memfine_fx", "passes", "models")
    return _git("rev-parse", "--short=9", "HEAD") + "+" * bool(changed)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def longest_with(row: dict[str, Any], memory: int) -> tuple[int, bool]:
    """The longest sequence with memfine_fx, and whether checkpointed layers give it."""
    budget, checkpoints = (row.get(way, {}).get(str(memory), 0) for way in WAYS[:2])
    return max(budget, checkpoints), checkpoints > budget


def page(lines: Sequence[dict[str, Any]]) -> str:
    """The page of the file's lines."""
    table = ["| model | weights | training | " + " | ".join(f"{memory} GB" for memory in MEMORIES) + " |"]
    table.append("|---|---|---|" + "---|" * len(MEMORIES))
    rows = merged(lines)
    beyond = [row for row in rows if "floor_bytes" in row]
    within = [row for row in rows if "floor_bytes" not in row]
    table += [_line(row) for row in within]
    counted = {"known": len(KNOWN_MODELS), "asked": len(rows), "all": len(KNOWN_MODELS) * len(TRAINS)}
    text = _HEAD.format(**counted) + "\n".join(table) + "\n"
    partial = [f"{row['model']} ({TRAININGS[row['train']]})" for row in within if WAYS[1] not in row]
    text += _PARTIAL.format(rows=", ".join(partial)) if partial else ""
    text += _BEYOND + _beyond(beyond) if beyond else ""
    return text + _provenance(within)


def _line(row: dict[str, Any]) -> str:
    cells = []
    for memory in MEMORIES:
        ours, has_checkpoints = longest_with(row, memory)
        theirs = _shown(row["without"][str(memory)]) if "without" in row else "?"
        pair = f"{_shown(ours)}{' c' if has_checkpoints else ''} / {theirs}"
        cells.append("-" if pair == "- / -" else pair)
    weights = f"{row['parameter_bytes'] / 1e9:.1f} GB"
    return f"| {row['model']} | {weights} | {TRAININGS[row['train']]} | " + " | ".join(cells) + " |"


def _provenance(rows: Sequence[dict[str, Any]]) -> str:
    """Which commits gave the answers, where there are any."""
    codes = dict.fromkeys(code or _OLD for row in rows for code in row["codes"].values())
    if not codes:
        return ""
    return f"\nThe file has the commit of each answer: {', '.join(codes)}.\n"


def _beyond(rows: Sequence[dict[str, Any]]) -> str:
    """Models beyond every memory, with the bytes that they take without a token."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        found.setdefault(row["model"], {})[row["train"]] = row["floor_bytes"]
    lines = ["| model | " + " | ".join(TRAININGS[train] for train in TRAINS) + " |"]
    lines.append("|---|" + "---|" * len(TRAINS))
    for model, floors in found.items():
        cells = [f"{floors[train] / 1e9:,.0f} GB" if train in floors else "" for train in TRAINS]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _shown(seq: int) -> str:
    if seq >= _MOST_TOKENS:
        return f"{_MOST_TOKENS:,} or more"
    return f"{seq:,}" if seq else "-"


def _lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []


if __name__ == "__main__":
    sys.exit(main())
