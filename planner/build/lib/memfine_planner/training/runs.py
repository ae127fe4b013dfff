"""Published runs as strategies: the rows of data/published_runs.json, or of a user's file of the same form.

A row gives the parallel sizes; what it leaves open (overlap, dispatcher, graphs) follows the framework's presets for
that system (`preset`), unless the row says otherwise under "settings".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from memfine_fx.errors import ConfigError
from memfine_planner.costs.architectures import Architecture
from memfine_planner.costs.model_configs import architecture, architecture_from_sizes
from memfine_planner.costs.strategy import Strategy, check, with_fields
from memfine_planner.files import read_json, refuse_misspelt, validated
from memfine_planner.hardware.systems import System, system, system_from_fields

__all__ = ["Run", "load_runs", "outside_runs", "preset", "published", "published_runs"]

_FOLDER = Path(__file__).parent / "data"
_DATA = _FOLDER / "published_runs.json"


@dataclass(frozen=True)
class Run:
    """One measured run.

    Args:
        kind: "throughput" (tokens/s/GPU) or "iteration" (seconds a step).
        measured: the published figure.
        blind: what the model said of it before anything was changed for it, where that was kept.
        peak_gib: measured peak, where published.
        calibrates: False for a row that is predicted but neither fitted nor averaged where nothing was fitted;
            `remark` says why.
    """

    name: str
    kind: str
    arch: Architecture
    system: System
    strategy: Strategy
    measured: float
    source: str
    blind: float | None = None
    peak_gib: float | None = None
    calibrates: bool = True
    remark: str = ""

    @property
    def group(self) -> str:
        """What leave-one-group-out leaves out: a model."""
        return self.arch.name

    @property
    def family(self) -> str:
        return "iteration" if self.kind == "iteration" else "MoE" if self.arch.is_moe else "dense"


@cache
def published() -> Mapping[str, Any]:
    """The packaged file as it is."""
    loaded: dict[str, Any] = json.loads(_DATA.read_text())
    return loaded


@cache
def published_runs() -> tuple[Run, ...]:
    """The packaged timed runs."""
    return _runs(published(), str(_DATA))


def outside_runs() -> dict[str, tuple[Run, ...]]:
    """Runs that nothing was fitted to: seen during development, and predicted blind first."""
    return {name: load_runs(_FOLDER / f"{name}_runs.json") for name in ("held_out", "blind")}


def load_runs(path: Path) -> tuple[Run, ...]:
    """Timed runs of a file in the form of the packaged one ("throughput", "iteration_time", "architectures").

    Raises:
        ConfigError: the file cannot be read, a field is missing or of another kind, or a row's strategy breaks a rule;
            the message names row and field.
    """
    return _runs(read_json(path, "the runs file"), str(path))


def preset(arch: Architecture, sys: System, vp: int, recompute: str = "none") -> dict[str, Any]:
    """What current frameworks switch on by default for a model on a system.

    As in the workload presets of Megatron-Bridge 0.2 and 0.3: NVL72 systems run the fused hierarchical dispatcher
    (not for experts with biases); others the plain all-to-all, hidden behind the neighbouring micro-batch where the
    pipeline is interleaved, which works neither with whole layers nor with experts recomputed. Presets for Blackwell
    capture partial CUDA graphs, but not together with that overlap.
    """
    is_rack = sys.nvlink_domain > 8
    overlaps = arch.is_moe and not is_rack and vp > 1 and recompute in ("none", "selective")
    return {
        "dispatcher": "hierarchical" if is_rack and not arch.expert_bias else "alltoall",
        "cuda_graphs": "partial" if sys.generation == "blackwell" and not overlaps else "none",
        "overlap_ep": overlaps,
        "grad_bytes": 2,
    }


_TABLES: dict[str, type] = {"architectures": dict, "systems": dict, "throughput": list, "iteration_time": list}


def _runs(loaded: object, source: str) -> tuple[Run, ...]:
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{source}: expected an object with lists of runs, got {type(loaded).__name__}")
    tables: dict[str, Any] = {}
    for name, kind in _TABLES.items():
        tables[name] = kind() if loaded.get(name) is None else loaded[name]
        if not isinstance(tables[name], kind):
            raise ConfigError(f"{source}: {name}: expected a {kind.__name__}, got {type(tables[name]).__name__}")
    refuse_misspelt(loaded, _TABLES, f"{source}: runs")
    own = {
        name: architecture_from_sizes(name, fields, f"{source}: architectures.{name}")
        for name, fields in tables["architectures"].items()
    }
    systems = {name: system_from_fields(name, fields, Path(source)) for name, fields in tables["systems"].items()}
    found = []
    records: dict[str, type[_Throughput] | type[_Iteration]] = {"throughput": _Throughput, "iteration_time": _Iteration}
    for table, record in records.items():
        for index, fields in enumerate(tables[table]):
            where = f"{source}: {table}[{index}]"
            row = validated(record, fields, where)
            refuse_misspelt(fields, record.model_fields, where)
            try:
                arch = own.get(row.model) or architecture(row.model)
                run = row.run(arch, systems.get(row.system) or system(row.system))
                check(run.arch, run.system, run.strategy)
            except ConfigError as error:
                raise ConfigError(f"{where} ({row.model} on {row.system}): {error}") from None
            found.append(run)
    if not found:
        raise ConfigError(f"{source}: expected at least one run in throughput or iteration_time")
    return tuple(found)


_Size = Annotated[int, Field(ge=1)]
_Measured = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Row(BaseModel):
    """What every row of a runs file has; a size that is null or absent is 1."""

    model_config = ConfigDict(strict=True)

    model: str
    system: str
    gpus: _Size
    tp: _Size
    pp: _Size
    vp: _Size | None = None
    mbs: _Size
    gbs: _Size
    seq: _Size
    precision: str
    source: str | None = None


class _Throughput(_Row):
    """A row of "throughput"."""

    cp: _Size | None = None
    ep: _Size | None = None
    fsdp: Annotated[int, Field(ge=0)] | bool | None = None
    settings: dict[str, Any] | None = None
    tokens_per_s_per_gpu: _Measured
    blind_tokens_per_s_per_gpu: _Measured | None = None
    peak_gib: _Measured | None = None
    calibrate: bool | None = None
    informed: str | None = None
    remark: str | None = None

    def run(self, arch: Architecture, sys: System) -> Run:
        vp, settings = self.vp or 1, self.settings or {}
        options = preset(arch, sys, vp, settings.get("recompute", "none")) | settings
        strategy = with_fields(
            Strategy(
                gpus=self.gpus,
                tp=self.tp,
                pp=self.pp,
                vp=vp,
                cp=self.cp or 1,
                ep=self.ep or 1,
                zero=3 if self.fsdp else 1,
                micro_batch=self.mbs,
                global_batch=self.gbs,
                seq=self.seq,
                precision=self.precision,
            ),
            **options,
        )
        remark = self.remark or ""
        if self.informed:
            remark = f"informed {self.informed}"
        elif self.calibrate is False:
            remark = (
                f"{remark}; not fitted" if remark.startswith("contradicts itself") else "contradicts itself: not fitted"
            )
        return Run(
            f"{self.model} {sys.name} {self.precision}",
            "throughput",
            arch,
            sys,
            strategy,
            self.tokens_per_s_per_gpu,
            self.source or "",
            self.blind_tokens_per_s_per_gpu,
            self.peak_gib,
            self.calibrate is not False and not self.informed,
            remark,
        )


class _Iteration(_Row):
    """A row of "iteration_time", run as arXiv 2205.05198 ran its models."""

    recompute: Literal["full", "selective", "selective+sequence_parallel"]
    iteration_s: _Measured

    def run(self, arch: Architecture, sys: System) -> Run:
        full = self.recompute == "full"
        strategy = Strategy(
            gpus=self.gpus,
            tp=self.tp,
            pp=self.pp,
            vp=self.vp or 1,
            micro_batch=self.mbs,
            global_batch=self.gbs,
            seq=self.seq,
            precision=self.precision,
            zero=0,
            recompute="full" if full else "selective",
            sequence_parallel=not full,
            attention="unfused",
            overlap_tp=False,
            overlap_pp=False,
        )
        name = f"{self.model} {sys.name} {strategy.recompute}"
        return Run(name, "iteration", arch, sys, strategy, self.iteration_s, self.source or "")
