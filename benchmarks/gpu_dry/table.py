"""What dry runs found: the file that records it, and the table of docs/gpu.md."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_kernels import PAGE

__all__ = ["FILE", "MODELS", "PAGE", "filled", "written"]

FILE = Path(__file__).resolve().parents[1] / "results" / "gpu_dry.json"
MODELS = {"Qwen3-30B-A3B": 2, "GPT-OSS-120B": 2, "Mixtral-8x7B": 2, "DeepSeek-V3": 1}
"""Name in `known_models` -> layers."""
_BLOCK = re.compile(r"(<!-- gpu-dry -->\n).*?(?=<!-- end -->)", re.DOTALL)


def written(rows: Sequence[dict[str, Any]]) -> str:
    """A file of them, a row a line."""
    return "[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n"


def filled(text: str, rows: Sequence[dict[str, Any]]) -> str:
    """A page with its table written anew."""
    head = [
        "model", "graph breaks", "regions", "kernels compiled", "launches, forward and backward", "windows of a layer",
        "a layer's own launches", "waits for the device", "predicted peak",
    ]  # fmt: skip
    lines = [head, ["---"] * len(head), *map(_cells, rows)]
    table = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
    return _BLOCK.sub(lambda block: f"{block[1]}\n{table}\n", text)


def _cells(row: dict[str, Any]) -> list[object]:
    return [
        row["model"],
        row["graph_breaks"],
        row["regions"],
        row["generated"],
        f"{row['forward']} + {row['backward']}",
        row["windows"],
        sum(row["of_regions"].values()),
        ", ".join(row["waits"]) or "none",
        f"{row['peak_bytes'] / 1e9:.1f} GB",
    ]
