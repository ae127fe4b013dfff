"""The figures of docs/ that are drawn from the package itself: a region, its chunks, its peak by rows a chunk; and the
front of budgets, from the committed rows.

    python -m benchmarks.docs_figures

docs/memory_over_step.svg is measured by `make demo`, docs/expert_parallel_scale.svg is drawn by `python -m benchmarks
measure ep_scale`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.figures import charts_of
from benchmarks.harness import read_rows
from benchmarks.readme import RESULTS, ROOT
from memfine_fx.api import explain
from memfine_fx.compiler.swiglu import layer_bytes
from memfine_fx.config import Config
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.plan.layer import LayerSizes, sweep_rows
from memfine_fx.report.chart import Axis, Box, Chart, Line, level, write_charts
from memfine_fx.runtime.routing import SliceCounter, sort_assignments
from memfine_fx.runtime.schedule import Chunk, rows_schedule, tokens_schedule

__all__ = ["draw_chunks", "draw_front", "draw_peaks", "draw_region"]

MIB = 2**20
NUM_TOKENS, NUM_EXPERTS, TOP_K, ROWS, TOKENS_PER_SLICE = 1024, 16, 2, 256, 512


def draw_region(path: Path) -> None:
    """The graph of one MoE region of a Qwen3-MoE, as SVG."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 64, (2, 64))
    found = explain(tiny_causal_lm("qwen3_moe"), input_ids=tokens, labels=tokens, config=Config(inner_backend="eager"))
    path.write_text(found.picture(), encoding="utf-8")


def draw_chunks(path: Path) -> None:
    """Rows of each chunk in the order of the walk, under even and skewed routing, for both axes."""
    torch.manual_seed(0)
    walks: list[list[tuple[list[Chunk], str, str]]] = [[], []]
    for name, exponent, colour in (("even", 0.0, "series0"), ("skewed (Zipf)", 1.2, "series4")):
        order, offsets = sort_assignments(_routing(exponent), NUM_EXPERTS)
        slices = SliceCounter(order, offsets, TOP_K, NUM_TOKENS).bounds(TOKENS_PER_SLICE)
        rows = rows_schedule(offsets.tolist(), ROWS, groups=False)
        walks[0].append((rows, f"rows axis, {name} routing", colour))
        walks[1].append((tokens_schedule(slices.tolist()), f"two slices of tokens, {name} routing", colour))
    y = Axis("rows in the chunk", 0, 1.1 * max(chunk.num_rows for row in walks for walk in row for chunk in walk[0]))
    write_charts(path, [[_titled(*walk, y) for walk in row] for row in walks])


def draw_peaks(path: Path) -> None:
    """The layer of the benchmark suite `layer`: predicted peak beyond parameters by rows a chunk."""
    sizes = LayerSizes(num_tokens=8192, hidden=512, expert_width=1024, num_experts=16, top_k=4, dtype=torch.float32)
    points = sweep_rows(sizes, layer_bytes(sizes))
    line = Line([(point.rows, point.peak_bytes / MIB) for point in points], has_dots=True)
    x = Axis("rows a chunk, R", is_log=True, ticks=[(point.rows, f"{point.rows:,}") for point in points])
    title = "One layer, T=8192 H=512 F=1024 E=16 K=4, fp32: forward and backward"
    write_charts(path, [[(title, Chart(x, Axis("predicted peak, MiB"), [line]))]], width=700)


def draw_front(path: Path) -> None:
    """Step time by bytes of the whole step, from the rows of the benchmark suite `budget`."""
    rows = [row for row in read_rows(RESULTS / "budget_cpu.jsonl") if row.job.workload == "front"]
    write_charts(path, [list(charts_of(rows).items())], width=760)


def _routing(exponent: float) -> torch.Tensor:
    """[T,K] different experts a token, drawn with weights 1 / rank^exponent."""
    weights = torch.arange(1, NUM_EXPERTS + 1, dtype=torch.float64).pow(-exponent)
    return torch.multinomial(weights.expand(NUM_TOKENS, -1), TOP_K)


def _titled(chunks: list[Chunk], title: str, colour: str, y: Axis) -> tuple[str, Chart]:
    boxes = [Box(place - 0.45, place + 0.45, 0, chunk.num_rows, colour=colour) for place, chunk in enumerate(chunks)]
    x = Axis("chunk, in the order of the walk")
    return f"{title}: {len(chunks)} chunks", Chart(x, y, [*boxes, level(ROWS, f"R = {ROWS}")], height=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    folder = parser.parse_args().out
    draw_region(folder / "region.svg")
    draw_chunks(folder / "chunks.svg")
    draw_peaks(folder / "rows_per_chunk.svg")
    draw_front(folder / "front.svg")


if __name__ == "__main__":
    main()
