"""The figures of docs/ that are drawn from the package itself: a region, its chunks, its peak by rows a chunk; and the
front of budgets, from the committed rows.

    python -m benchmarks.docs_figures

docs/memory_over_step.png is measured by `make demo`, docs/expert_parallel_scale.png is drawn by `python -m benchmarks
measure ep_scale`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import pictures_of
from benchmarks.harness import read_rows
from benchmarks.readme import RESULTS, ROOT
from memfine_fx.api import explain
from memfine_fx.compiler.swiglu import layer_bytes
from memfine_fx.config import Config
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.plan.layer import LayerSizes, sweep_rows
from memfine_fx.report.figure import blank_figure
from memfine_fx.runtime.routing import SliceCounter, sort_assignments
from memfine_fx.runtime.schedule import Chunk, rows_schedule, tokens_schedule

__all__ = ["draw_chunks", "draw_front", "draw_peaks", "draw_region"]

MIB = 2**20
NUM_TOKENS, NUM_EXPERTS, TOP_K, ROWS, TOKENS_PER_SLICE = 1024, 16, 2, 256, 512
_EVEN, _SKEWED, _LIMIT = "#3f7cac", "#d9822b", "#b3261e"


def draw_region(path: Path) -> None:
    """The graph of one MoE region of a Qwen3-MoE, as SVG."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 64, (2, 64))
    found = explain(tiny_causal_lm("qwen3_moe"), input_ids=tokens, labels=tokens, config=Config(inner_backend="eager"))
    path.write_text(found.picture(), encoding="utf-8")


def draw_chunks(path: Path) -> None:
    """Rows of each chunk in the order of the walk, under even and skewed routing, for both axes."""
    torch.manual_seed(0)
    figure, first = blank_figure((9, 5), "drawing chunks")
    first.remove()
    axes = figure.subplots(2, 2, sharey=True)
    for place, (name, exponent, colour) in enumerate((("even", 0.0, _EVEN), ("skewed (Zipf)", 1.2, _SKEWED))):
        order, offsets = sort_assignments(_routing(exponent), NUM_EXPERTS)
        slices = SliceCounter(order, offsets, TOP_K, NUM_TOKENS).bounds(TOKENS_PER_SLICE)
        by_rows = rows_schedule(offsets.tolist(), ROWS, groups=False)
        _draw(axes[0, place], by_rows, f"rows axis, {name} routing", colour)
        _draw(axes[1, place], tokens_schedule(slices.tolist()), f"two slices of tokens, {name} routing", colour)
    figure.supxlabel("chunk, in the order of the walk", fontsize=10)
    figure.supylabel("rows in the chunk", fontsize=10)
    figure.savefig(path)


def draw_peaks(path: Path) -> None:
    """The layer of the benchmark suite `layer`: predicted peak beyond parameters by rows a chunk."""
    sizes = LayerSizes(num_tokens=8192, hidden=512, expert_width=1024, num_experts=16, top_k=4, dtype=torch.float32)
    points = sweep_rows(sizes, layer_bytes(sizes))
    figure, axes = blank_figure((7, 3.5), "drawing peaks")
    axes.plot([point.rows for point in points], [point.peak_bytes / MIB for point in points], marker="o", color=_EVEN)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks([point.rows for point in points], [f"{point.rows:,}" for point in points], rotation=30)
    axes.set(xlabel="rows a chunk, R", ylabel="predicted peak, MiB")
    axes.set_title("One layer, T=8192 H=512 F=1024 E=16 K=4, fp32: forward and backward", fontsize=9)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def draw_front(path: Path) -> None:
    """Step time by bytes of the whole step, from the rows of the benchmark suite `budget`."""
    rows = [row for row in read_rows(RESULTS / "budget_cpu.jsonl") if row.job.workload == "front"]
    (picture,) = pictures_of(rows)
    path.write_bytes(picture.png)


def _routing(exponent: float) -> torch.Tensor:
    """[T,K] different experts a token, drawn with weights 1 / rank^exponent."""
    weights = torch.arange(1, NUM_EXPERTS + 1, dtype=torch.float64).pow(-exponent)
    return torch.multinomial(weights.expand(NUM_TOKENS, -1), TOP_K)


def _draw(axes: Any, chunks: list[Chunk], title: str, colour: str) -> None:
    axes.bar(range(len(chunks)), [chunk.num_rows for chunk in chunks], color=colour, width=0.9)
    axes.axhline(ROWS, color=_LIMIT, linewidth=1, linestyle="--", label=f"R = {ROWS}")
    axes.set_title(f"{title}: {len(chunks)} chunks", fontsize=9)
    axes.set_xticks(range(0, len(chunks), 4))
    axes.legend(fontsize=8, loc="upper right")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    folder = parser.parse_args().out
    draw_region(folder / "region.svg")
    draw_chunks(folder / "chunks.png")
    draw_peaks(folder / "rows_per_chunk.png")
    draw_front(folder / "front.png")


if __name__ == "__main__":
    main()
