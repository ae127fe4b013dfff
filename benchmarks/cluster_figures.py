"""What matters for three models on a cluster: a table, and the two figures of planner/docs/training.md.

    python -m benchmarks.cluster_figures

One study a model (`memfine plan training --sweep`): every factor of `STUDIES` alone, the strategy chosen anew at every
value. Printed is the table, and for each factor where its bottlenecks take over; drawn are, a column a model, how far
each factor moves the useful speed with the elasticities, and the best strategy over the number of GPUs with where the
time goes. A few minutes; no GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.readme import ROOT
from memfine_fx.report.chart import Chart, write_charts
from memfine_planner.costs.model_configs import architecture
from memfine_planner.hardware.systems import system
from memfine_planner.training.faults import FaultModel
from memfine_planner.training.routing import Routing
from memfine_planner.training.sweep import FACTORS, Study, Sweep, parse_factor, study
from memfine_planner.training.sweep_report import elasticity_chart, range_chart, shares_chart, speed_chart
from memfine_planner.training.tuner import Request, tune

__all__ = ["STUDIES", "Question", "answered", "asked", "table", "takeovers"]


@dataclass(frozen=True)
class Question:
    """A model, its GPUs and format, and the factors that are varied around its plan."""

    model: str
    gpus: int
    precision: str
    factors: tuple[str, ...]


_SHARED = ("seq=4096:65536", "memory=40:160", "bandwidth=12.5:200", "mtbf=5000:80000")
STUDIES = (
    Question("llama3_70b", 256, "BF16", ("gpus=64:16384", "tp=1:8", "nvlink=112:900", *_SHARED)),
    Question("qwen3_235b_a22b", 256, "BF16", ("gpus=64:16384", "ep=1:128", "chunks=1:8", *_SHARED)),
    Question("deepseek_v3", 1024, "FP8-CS", ("gpus=256:16384", "ep=1:64", "chunks=1:8", *_SHARED)),
)
_ELASTICITIES = ("flops", "bandwidth", "hbm", "host time a launch")


def asked(question: Question) -> Request:
    """The request that the command makes of it: 8 sequences of 4,096 tokens a GPU, the paper's table of routing."""
    arch = architecture(question.model)
    return Request(
        arch,
        system("H100"),
        question.gpus,
        8 * question.gpus,
        4096,
        question.precision,
        Routing("table" if arch.is_moe else "balanced"),
        FaultModel(spares=math.ceil(0.02 * question.gpus / 8)),
    )


def answered(question: Question) -> Study:
    request = asked(question)
    return study(request, [parse_factor(text) for text in question.factors], tune(request).best.strategy)


def table(studies: Iterable[tuple[Question, Study]]) -> str:
    """Markdown: over each factor's range, the lowest and highest useful speed relative to the plan's."""
    studies = list(studies)
    lines = [
        "| factor | " + " | ".join(f"{question.model}, {question.gpus:,} GPUs" for question, _ in studies) + " |",
        "|---" * (len(studies) + 1) + "|",
        "| plan | " + " | ".join(_plan(found) for _, found in studies) + " |",
    ]
    swept = [{one.factor: one for one in found.sweeps} for _, found in studies]
    for name in dict.fromkeys(name for each in swept for name in each):
        lines.append(f"| {name} | " + " | ".join(_gain(each.get(name)) for each in swept) + " |")
    for name in _ELASTICITIES:
        values = [next(one.value for one in found.elasticities if one.factor == name) for _, found in studies]
        lines.append(f"| elasticity of {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    return "\n".join(lines)


def _plan(found: Study) -> str:
    base = found.sweeps[0].base
    assert base.best is not None
    return f"{base.best.strategy.label()}: {base.speed:,.0f}"


def _gain(swept: Sweep | None) -> str:
    if swept is None:
        return ""
    low, high = swept.gain
    values = [point.value for point in swept.points if point.best]
    return f"{low:.2f} to {high:.2f} ({values[0]:,.6g} to {values[-1]:,.6g})"


def takeovers(question: Question, found: Study) -> str:
    """Where the largest loss becomes another one, and where another strategy wins, factor by factor."""
    lines = [question.model]
    for swept in found.sweeps:
        losses = "; ".join(f"{name} from {value:,.6g}" for value, name in swept.takeovers)
        lines.append(f"  {swept.factor} ({FACTORS[swept.factor]}): {losses}")
        shown = ""
        for point in swept.points:
            label = point.best.strategy.label() if point.best else "nothing fits"
            if label != shown:
                lines.append(f"    {point.value:,.6g}: {label}, {point.speed:,.0f} tokens/s/GPU")
            shown = label
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "planner" / "docs")
    folder = parser.parse_args().out
    studies = [(question, answered(question)) for question in STUDIES]
    print(table(studies))
    for question, found in studies:
        print("\n" + takeovers(question, found))
    titles = [f"{question.model}, {question.gpus:,} H100, {question.precision}" for question, _ in studies]
    found = [each for _, each in studies]
    _write(folder / "cluster_factors.svg", titles, found, range_chart, elasticity_chart)
    scales = [next(swept for swept in each.sweeps if swept.factor == "gpus") for each in found]
    _write(folder / "cluster_scale.svg", titles, scales, speed_chart, shares_chart)


def _write(path: Path, titles: Sequence[str], found: Sequence[Any], *drawings: Callable[[Any], Chart]) -> None:
    """Write a picture: a column a model, a row a drawing."""
    write_charts(path, [[(t, drawing(each)) for t, each in zip(titles, found, strict=True)] for drawing in drawings])


if __name__ == "__main__":
    main()
