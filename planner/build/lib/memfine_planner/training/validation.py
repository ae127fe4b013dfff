"""Predicted against published: time, memory, faults; fitted and leave-one-group-out errors apart.

A group is a model: for each, the calibration is fitted again without any of its runs, and they are predicted with
that. `check_runs` predicts runs of a file that the calibration never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from memfine_fx.memory import closed_form
from memfine_fx.memory import published as memfine
from memfine_planner.costs.calibration import Calibration, fitted
from memfine_planner.costs.model_configs import architecture
from memfine_planner.costs.strategy import Recompute, Strategy
from memfine_planner.hardware.systems import system
from memfine_planner.training.activations import layer_activation_bytes
from memfine_planner.training.faults import PUBLISHED_RATE_PER_GPU_HOUR, FaultModel, best_interval, checkpoint_cost
from memfine_planner.training.fitting import leave_one_group_out, predict
from memfine_planner.training.memory import ALPHA, live_sets, memory, static_terms
from memfine_planner.training.runs import Run, published, published_runs
from memfine_planner.training.stages import stages

__all__ = ["FaultCheck", "MemoryRow", "TimeRow", "Validation", "check_runs", "runs_table", "validate"]


@dataclass(frozen=True)
class TimeRow:
    """One run: measured, predicted by the calibration, and by the one fitted without its model.

    `peak` is the predicted peak of the fullest rank in bytes.
    """

    run: Run
    predicted: float
    left_out: float | None
    peak: float

    @property
    def fits(self) -> bool:
        return self.peak <= ALPHA * self.run.system.memory_bytes

    @property
    def blind_error(self) -> float | None:
        return None if self.run.blind is None else self.run.blind / self.run.measured - 1

    @property
    def error(self) -> float:
        return self.predicted / self.run.measured - 1

    @property
    def left_out_error(self) -> float | None:
        return None if self.left_out is None else self.left_out / self.run.measured - 1


@dataclass(frozen=True)
class MemoryRow:
    """One published memory figure; `difference` is relative, or in points for ratios."""

    name: str
    quantity: str
    predicted: float
    published: float
    unit: str

    @property
    def difference(self) -> float:
        return self.predicted - self.published if self.unit == "%" else self.predicted / self.published - 1


@dataclass(frozen=True)
class FaultCheck:
    """The published interruption rate with stated checkpoint times, and the effective time that follows."""

    gpus: int
    mtbf_hours: float
    interval_s: float
    blocking_s: float
    effective: float
    goodput: float
    published: str


@dataclass(frozen=True)
class Validation:
    """Everything that is compared."""

    times: tuple[TimeRow, ...]
    memories: tuple[MemoryRow, ...]
    memfine: tuple[tuple[str, bool, bool], ...]
    faults: FaultCheck
    ordered_pairs: int
    pairs: int

    def mean_error(self, family: str, *, left_out: bool) -> float:
        """Mean absolute relative error of "iteration", "dense" or "MoE" rows."""
        errors = [
            abs(row.left_out_error if left_out and row.left_out_error is not None else row.error)
            for row in self.times
            if row.run.family == family
        ]
        return sum(errors) / len(errors)

    def __str__(self) -> str:
        lines = [runs_table(self.times)]
        lines.append("mean absolute error, fitted and with the row's model left out of the fit:")
        for family in ("iteration", "dense", "MoE"):
            both = f"{self.mean_error(family, left_out=False):.1%}, {self.mean_error(family, left_out=True):.1%}"
            lines.append(f"  {family:10} {both}")
        lines.append(f"of two strategies, the faster is predicted faster in {self.ordered_pairs} of {self.pairs} pairs")
        lines.append("")
        lines.append(f"{'memory':34}{'published':>11}{'predicted':>11}{'difference':>12}")
        for memory_row in self.memories:
            unit = " points" if memory_row.unit == "%" else ""
            shown = f"{memory_row.difference:+.2f}{unit}" if unit else f"{memory_row.difference:+.2%}"
            name = f"{memory_row.name} {memory_row.quantity}"
            lines.append(f"{name:34}{memory_row.published:11.2f}{memory_row.predicted:11.2f}{shown:>12}")
        lines.append("")
        lines += [
            f"MemFine {name}: predicted {'trains' if ours else 'out of memory'}, "
            f"published {'trains' if theirs else 'out of memory'}"
            for name, ours, theirs in self.memfine
        ]
        f = self.faults
        lines.append(
            f"faults: {f.gpus} GPUs, MTBF {f.mtbf_hours:.2f} h, checkpoint every {f.interval_s:.0f} s stopping "
            f"{f.blocking_s:.1f} s: effective training time {f.effective:.1%} (published {f.published}), "
            f"goodput {f.goodput:.1%}"
        )
        return "\n".join(lines)


def validate() -> Validation:
    """Compare with everything in the packaged file."""
    runs, calibration = published_runs(), fitted()
    without = leave_one_group_out(runs, calibration)
    times = tuple(_time_row(run, calibration, without.get(run.group)) for run in runs)
    ordered, pairs = _ordered_pairs(times)
    return Validation(times, _memory_rows(), _memfine_rows(), _fault_check(), ordered, pairs)


def check_runs(runs: Sequence[Run], calibration: Calibration | None = None) -> tuple[TimeRow, ...]:
    """Predict runs with the packaged calibration; nothing is fitted to them."""
    return tuple(_time_row(run, calibration or fitted(), None) for run in runs)


def runs_table(rows: Sequence[TimeRow]) -> str:
    """Measured and predicted, a row each, and the mean error of each family that has no left-out errors."""
    lines = [f"{'run':34}{'measured':>10}{'predicted':>10}{'error':>8}{'left out':>9}{'blind':>8}  memory"]
    for row in rows:
        out, blind = ("" if error is None else f"{error:+.1%}" for error in (row.left_out_error, row.blind_error))
        fits = "fits" if row.fits else "over"
        if row.run.peak_gib:
            fits += f", {row.peak / 2**30:.1f} GiB (measured {row.run.peak_gib:.1f})"
        lines.append(
            f"{row.run.name:34}{row.run.measured:10.2f}{row.predicted:10.2f}{row.error:+8.1%}{out:>9}{blind:>8}  {fits}"
            + (f"  ({row.run.remark})" if row.run.remark else "")
        )
    for family in ("iteration", "dense", "MoE"):
        known = [row for row in rows if row.run.family == family and row.left_out is None]
        errors = [abs(row.error) for row in known if row.run.calibrates]
        blind_errors = [abs(row.blind_error) for row in known if row.blind_error is not None]
        if errors:
            lines.append(f"mean absolute error, {family}: {sum(errors) / len(errors):.1%} of {len(errors)} runs")
        if blind_errors:
            mean = sum(blind_errors) / len(blind_errors)
            lines.append(f"  at first sight: {mean:.1%} of {len(blind_errors)} runs")
    return "\n".join(lines)


def _time_row(run: Run, calibration: Calibration, without: Calibration | None) -> TimeRow:
    peak = max(rank.peak for rank in memory(run.arch, run.system, run.strategy))
    return TimeRow(
        run,
        predict(run, calibration),
        None if without is None else predict(run, without),
        peak,
    )


def _ordered_pairs(times: Sequence[TimeRow]) -> tuple[int, int]:
    """Pairs of runs of one model, system and size, and in how many the prediction has the measured order."""
    ordered = pairs = 0
    for one, other in combinations(times, 2):
        same = (one.run.arch, one.run.system, one.run.kind) == (other.run.arch, other.run.system, other.run.kind)
        if not same or one.run.strategy.gpus != other.run.strategy.gpus:
            continue
        pairs += 1
        ordered += (one.predicted > other.predicted) == (one.run.measured > other.run.measured)
    return ordered, pairs


def _memory_rows() -> tuple[MemoryRow, ...]:
    bases = {run.arch.name: run for run in published_runs() if run.kind == "iteration"}
    rows: list[MemoryRow] = []
    for entry in published()["memory"]:
        run = bases[entry["model"]]
        rows += [
            MemoryRow(
                entry["model"],
                "layers' weights, optimizer",
                _layer_states(run) / 2**30,
                entry["parameters_and_optimizer_gib"],
                "GiB",
            ),
            MemoryRow(
                entry["model"],
                "activations",
                _kept(run, "none", False) / 2**30,
                entry["activations_gib_none"],
                "GiB",
            ),
            MemoryRow(
                entry["model"],
                "activations, selective + SP",
                _kept(run, "selective", True) / 2**30,
                entry["activations_gib_selective_sequence_parallel"],
                "GiB",
            ),
        ]
    kinds: tuple[tuple[str, Recompute, bool], ...] = (
        ("sequence_parallel", "none", True),
        ("selective", "selective", False),
        ("selective_sequence_parallel", "selective", True),
        ("full_recompute", "full", False),
    )
    for entry in published()["memory_ratio"]:
        run = bases[entry["model"]]
        whole = _kept(run, "none", False)
        for name, recompute, sequence_parallel in kinds:
            share = 100 * _kept(run, recompute, sequence_parallel) / whole
            rows.append(MemoryRow(entry["model"], name.replace("_", " "), share, entry[name], "%"))
    return tuple(rows)


def _layer_states(run: Run) -> float:
    """Weights, gradients and optimizer of a stage's layers; the published figure counts no embedding."""
    stage = stages(run.arch, run.strategy.pp, run.strategy.vp)[0]
    inner = replace(stage, has_embedding=False, has_head=False)
    return sum(num_bytes for _, num_bytes in static_terms(run.arch, inner, run.strategy))


def _kept(run: Run, recompute: Recompute, sequence_parallel: bool) -> float:
    """Kept activations of the first stage's layers."""
    s = replace(run.strategy, recompute=recompute, sequence_parallel=sequence_parallel)
    stage = stages(run.arch, s.pp, s.vp)[0]
    per_set = sum(count * layer_activation_bytes(run.arch, kind, s).fixed for kind, count in stage.kinds)
    return live_sets(s, 0) * per_set


def _memfine_rows() -> tuple[tuple[str, bool, bool], ...]:
    rows = memfine.received_rows()
    found = []
    for method in memfine.METHODS:
        active = closed_form.activation_bytes(memfine.MODEL, memfine.PARALLEL, rows, chunks=method.chunks)
        fits = method.static_gb * memfine.GB + active <= memfine.M_GPU
        name = (
            f"model {method.model}, {method.name} (static {method.static_gb} GB, active {active / memfine.GB:.1f} GB)"
        )
        found.append((name, fits, method.trains))
    return tuple(found)


def _fault_check() -> FaultCheck:
    """Llama 3 405B on 16,384 H100: the published rate, our stated detection, restart and checkpoint times."""
    entry = published()["faults"][0]
    gpus, sys = entry["gpus"], system(entry["system"])
    faults = FaultModel(rate_per_gpu_hour=PUBLISHED_RATE_PER_GPU_HOUR, spares=64)
    strategy = Strategy(gpus=gpus, tp=8, pp=16, seq=8192, global_batch=gpus)
    cost = checkpoint_cost(architecture("llama3_405b").params, strategy, sys)
    best = best_interval(cost, faults, gpus)
    return FaultCheck(
        gpus,
        best.mtbf / 3600,
        best.interval,
        cost.blocking,
        best.effective_training_time,
        best.fraction,
        entry["effective_training_time"],
    )
