"""Bytes in, plan out: predictions against exact bytes, budgets kept, and time against bytes beside everyone else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from benchmarks.budgets import LEAST, NO_BUDGET, OURS
from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite, at_least, at_most
from benchmarks.summaries import MIB, Summary, align, summaries_of

MODELS = ("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v3", "gpt_oss")
PREDICTED = Sizes(
    batch=2, sequence=512, hidden=256, width=256, experts=8, top_k=2, layers=2, heads=4, kv_heads=2, head_dim=64,
    vocab=1024,
)  # fmt: skip
LONGER = Sizes(
    batch=1, sequence=1280, hidden=192, width=320, experts=8, top_k=2, layers=2, heads=4, kv_heads=2, head_dim=48,
    vocab=1024,
)  # fmt: skip
FRONT = Sizes(
    batch=2, sequence=1024, hidden=384, width=512, experts=16, top_k=4, layers=2, heads=6, kv_heads=3, head_dim=64,
    vocab=2048,
)  # fmt: skip
QUICK = Sizes(
    batch=2, sequence=256, hidden=128, width=128, experts=8, top_k=2, layers=1, heads=4, kv_heads=2, head_dim=32,
    vocab=512,
)  # fmt: skip
_PLAIN = ("eager", "eager+checkpoint", "compile", "compile+checkpoint")
_CHUNKED = ("diy", "diy+checkpoint", "diy+compile")
_RATIOS = ("compile-budget0.1", "compile-budget0.3", "compile-budget0.5", "compile-budget0.7", "compile-budget0.9")
_BUDGETS = tuple(f"{OURS}{tenth / 9:.2f}" for tenth in range(10))
TIME_ALLOWANCE = 1.03
LEAST_ALLOWANCE = 1.05
PLANNING_SHARE = 0.02


def _parts(quick: bool) -> Sequence[Part]:
    if quick:
        points = ("eager", f"{OURS}0", f"{OURS}1")
        return [
            Part("front", QUICK, "float32", ("memfine",), points=points, steps=3),
            Part("prediction:qwen3_moe", QUICK, "float32", ("memfine",), points=(LEAST,)),
        ]
    points = (*_PLAIN, *_CHUNKED, *_RATIOS, *_BUDGETS)
    return [
        Part("front", FRONT, "float32", ("memfine",), points=points, steps=9),
        *(
            Part(f"prediction:{model}", sizes, dtype, ("memfine",), points=(NO_BUDGET, "0.95", LEAST))
            for number, model in enumerate(MODELS)
            for sizes in (PREDICTED if number % 2 == 0 else LONGER,)
            for dtype in ("float32", "bfloat16")
        ),
    ]


@dataclass(frozen=True)
class FrontPoint:
    """One point of a front."""

    name: str
    seconds: float
    peak_bytes: float
    budget_bytes: float
    predicted_bytes: float
    compile_seconds: float
    plan_seconds: float
    partition_seconds: float
    differs_by: float

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)


def front_points(summary: Summary) -> list[FrontPoint]:
    series = summary.last.series
    columns = (series[one.name] for one in fields(FrontPoint)[1:])
    return [FrontPoint(*values) for values in zip(summary.job.points, *columns, strict=True)]


def _conclude(rows: Sequence[Row]) -> str:
    summaries = summaries_of(rows)
    texts = [_said_of_front(one) for one in summaries if one.job.workload == "front"]
    predicted = [one for one in summaries if one.job.workload.startswith("prediction")]
    return "\n\n".join([*texts, *([_said_of_predictions(predicted)] if predicted else [])])


def _said_of_front(summary: Summary) -> str:
    points = front_points(summary)
    cells = [["", "budget MiB", "peak MiB", "predicted", "step s", "fastest peer within", "its s", "ours/its"]]
    ratios: list[float] = []
    for point in points:
        within = [one for one in points if not one.is_ours and one.peak_bytes <= point.budget_bytes]
        best = min(within, key=lambda one: one.seconds, default=None)
        shown = ["-", "-", "-"]
        if point.is_ours and best is not None:
            ratios.append(point.seconds / best.seconds)
            shown = [best.name, f"{best.seconds:.3f}", f"{ratios[-1]:.2f}"]
        error = f"{point.predicted_bytes / point.peak_bytes - 1:+.2%}" if point.predicted_bytes else "-"
        budget = f"{point.budget_bytes / MIB:.1f}" if point.budget_bytes else "-"
        cells.append([point.name, budget, f"{point.peak_bytes / MIB:.1f}", error, f"{point.seconds:.3f}", *shown])
    ours = [point for point in points if point.is_ours]
    lines = [f"Time against bytes of whole steps, {summary.job.sizes}, {summary.job.dtype}", align(cells)]
    lines.append(at_most("largest peak against its budget", max(p.peak_bytes / p.budget_bytes for p in ours), 1.0))
    least = min(ours, key=lambda one: one.budget_bytes)
    what = "smallest budget named against the bytes with which its step works"
    lines.append(at_most(what, least.budget_bytes / least.peak_bytes, LEAST_ALLOWANCE))
    alone = sum(not any(one.peak_bytes <= p.budget_bytes for one in points if not one.is_ours) for p in ours)
    lines.append(f"{'':8}budgets in which no peer fits: {alone} of {len(ours)}")
    plain = next((one for one in points if one.name == "compile"), None)
    if plain is not None:
        lines.append(at_most("unconstrained: peak against torch.compile", ours[-1].peak_bytes / plain.peak_bytes, 1.0))
    if summary.job.sizes == FRONT:  # the quick one's steps are too short to be judged by their time
        lines += _said_of_time(ours[-1], plain, ratios)
    lines.append(
        at_most("largest difference of loss and gradients from eager", max(p.differs_by for p in points), 1e-3)
    )
    if summary.cold_compile_seconds is not None:
        cold = summary.cold_compile_seconds
        plan, partition = (max(getattr(p, name) for p in ours) for name in ("plan_seconds", "partition_seconds"))
        lines.append(at_most(f"planning against the cold compile of {cold:.0f} s", plan / cold, PLANNING_SHARE))
        lines.append(f"{'':8}further partitions of the graph, against the same: {partition / cold:.3f}")
    return "\n".join(lines)


def _said_of_time(free: FrontPoint, plain: FrontPoint | None, ratios: Sequence[float]) -> Iterator[str]:
    """Of budgets that some peer fits in, and of the point that is held by none."""
    if ratios:
        yield at_most("slowest against the fastest peer within its budget", max(ratios), TIME_ALLOWANCE)
    if plain is not None:
        yield at_most("unconstrained: time against torch.compile", free.seconds / plain.seconds, 0.95)


@dataclass(frozen=True)
class PredictedPoint:
    """One budget of one model: bytes of whole steps, as compiled and with all tokens sent to the same K experts."""

    model: str
    dtype: str
    point: str
    budget: float
    predicted: float
    measured: float
    skewed_predicted: float
    skewed_measured: float

    @property
    def needed(self) -> float:
        """Whatever the routing."""
        return max(self.measured, self.skewed_measured)


def _said_of_predictions(summaries: Sequence[Summary]) -> str:
    cells = [["model", "dtype", "budget", "budget MiB", "peak MiB", "error", "peak, all to K", "error"]]
    errors: list[float] = []
    found = list(_predictions(summaries))
    for one in found:
        errors += [one.predicted / one.measured - 1, one.skewed_predicted / one.skewed_measured - 1]
        shown = f"{one.budget / MIB:.2f}" if one.budget else "-"
        peaks = [f"{one.measured / MIB:.2f}", f"{errors[-2]:+.2%}"]
        skewed = [f"{one.skewed_measured / MIB:.2f}", f"{errors[-1]:+.2%}"]
        cells.append([one.model, one.dtype, one.point, shown, *peaks, *skewed])
    close = sum(abs(error) <= 0.05 for error in errors) / len(errors)
    lines = [
        f"Predicted peaks of whole steps: {len(errors)} combinations, exact allocator bytes",
        align(cells),
        at_least("share within 5% of the measured peak", close, 0.9),
        at_least("lowest prediction against the measured peak", min(errors), -0.02),
    ]
    kept = [one.needed / one.budget for one in found if one.budget]
    if kept:
        lines.append(at_most("largest peak against its budget", max(kept), 1.0))
    least = list(_least_against_what_works(found))
    if least:
        what = "smallest budget named against the fewest bytes with which a step works, largest"
        lines.append(at_most(what, max(least), LEAST_ALLOWANCE))
    return "\n".join(lines)


def _least_against_what_works(found: Sequence[PredictedPoint]) -> Iterator[float]:
    """Per model and dtype: the budget named, over the fewest bytes that a plan measured here needs."""
    for key in dict.fromkeys((one.model, one.dtype) for one in found):
        same = [one for one in found if (one.model, one.dtype) == key]
        fewest = min(one.needed for one in same)
        yield from (one.budget / fewest for one in same if one.point == LEAST)


def _predictions(summaries: Sequence[Summary]) -> Iterator[PredictedPoint]:
    for summary in summaries:
        model = summary.job.workload.partition(":")[2]
        columns = (summary.last.series[one.name] for one in fields(PredictedPoint)[3:])
        for point, *values in zip(summary.job.points, *columns, strict=True):
            yield PredictedPoint(model, summary.job.dtype, point, *values)


SUITE = Suite(
    "budget",
    "step time at every budget beside what fits in the same bytes; predicted and measured peaks",
    _parts,
    rounds=1,
    conclude=_conclude,
)
