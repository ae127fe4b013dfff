"""What dry runs found: the file that records it, and the table of docs/gpu.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_kernels import PAGE
from benchmarks.summaries import markdown, with_blocks

__all__ = ["FILE", "PAGE", "RUNS", "Run", "filled", "written"]

FILE = Path(__file__).resolve().parents[1] / "results" / "gpu_dry.json"


@dataclass(frozen=True)
class Run:
    """One model as it is trained.

    Args:
        model: in `benchmarks.known_models`.
        layers: of it.
        has_checkpoints: whether each is checkpointed, by transformers.
        has_autocast: whether it is trained under autocast to bf16, its weights in fp32; in bf16 beside adapters, as
            trainers have them with `bf16=True`.
        rank: of adapters on the experts and attention's projections, by PEFT, which alone are trained; 0 for none.
    """

    model: str
    layers: int = 2
    has_checkpoints: bool = False
    has_autocast: bool = False
    rank: int = 0

    @property
    def name(self) -> str:
        adapters = f", adapters of rank {self.rank}" if self.rank else ""
        return self.model + ", checkpoints" * self.has_checkpoints + ", autocast" * self.has_autocast + adapters


RUNS = (
    Run("Qwen3-30B-A3B"),
    Run("Qwen3-30B-A3B", has_checkpoints=True),
    Run("Qwen3-30B-A3B", has_autocast=True),
    Run("Qwen3-30B-A3B", rank=16),
    Run("Qwen3-30B-A3B", rank=16, has_autocast=True),
    Run("GPT-OSS-120B"),
    Run("GPT-OSS-120B", rank=16),
    Run("Mixtral-8x7B"),
    Run("DeepSeek-V3", layers=1),
)
_HEAD = ("", "graph breaks", "chunked layers", "chunks of the head", "waits for the device", "predicted peak GiB")


def written(rows: Sequence[dict[str, Any]]) -> str:
    """A file of them, a row a line."""
    return "[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n"


def filled(text: str, rows: Sequence[dict[str, Any]]) -> str:
    """A page with its table written anew."""
    table = markdown(" | ".join(_HEAD), [list(map(str, _cells(row))) for row in rows])
    return with_blocks(text, "gpu-dry", lambda _: f"{table}\n")


def _cells(row: dict[str, Any]) -> list[object]:
    peak = f"{row['peak_bytes'] / 2**30:#.3g}"
    return [row["model"], row["graph_breaks"], row["regions"], row["of_head"], ", ".join(row["waits"]) or "none", peak]
