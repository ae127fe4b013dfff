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
from typing import Any

from memfine_fx.errors import ConfigError
from memfine_fx.planning.costs.architectures import Architecture
from memfine_fx.planning.costs.model_configs import architecture, builtin_architectures
from memfine_fx.planning.costs.strategy import Strategy, with_fields
from memfine_fx.planning.hardware.systems import System, system, system_from_fields

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
        ConfigError: the file cannot be read, or a row lacks a field.
    """
    try:
        return _runs(json.loads(path.read_text()), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the runs file {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error


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


def _runs(loaded: Mapping[str, Any], source: str) -> tuple[Run, ...]:
    own = loaded.get("architectures", {})
    systems = {
        name: system_from_fields(name, fields, Path(source)) for name, fields in loaded.get("systems", {}).items()
    }
    found = []
    for kind, make in (("throughput", _throughput), ("iteration_time", _iteration)):
        for index, row in enumerate(loaded.get(kind, ())):
            try:
                name = row["model"]
                known = name in builtin_architectures() or name not in own
                arch = architecture(name if known else {"name": name} | own[name])
                found.append(make(row, arch, systems.get(row["system"]) or system(row["system"])))
            except KeyError as error:
                raise ConfigError(f"{source}: {kind}[{index}] lacks {error}") from None
    return tuple(found)


def _throughput(row: Mapping[str, Any], arch: Architecture, sys: System) -> Run:
    vp = row.get("vp") or 1
    settings = dict(row.get("settings", {}))
    options = preset(arch, sys, vp, settings.get("recompute", "none")) | settings
    strategy = with_fields(
        Strategy(
            gpus=row["gpus"],
            tp=row["tp"],
            pp=row["pp"],
            vp=vp,
            cp=row.get("cp", 1),
            ep=row.get("ep", 1),
            zero=3 if row.get("fsdp") else 1,
            micro_batch=row["mbs"],
            global_batch=row["gbs"],
            seq=row["seq"],
            precision=row["precision"],
        ),
        **options,
    )
    name = f"{row['model']} {sys.name} {row['precision']}"
    calibrates = row.get("calibrate", True) and "informed" not in row
    remark = row.get("remark", "")
    if "informed" in row:
        remark = f"informed {row['informed']}"
    elif not calibrates:
        remark = "contradicts itself: not fitted"
    return Run(
        name,
        "throughput",
        arch,
        sys,
        strategy,
        row["tokens_per_s_per_gpu"],
        row.get("source", ""),
        row.get("blind_tokens_per_s_per_gpu"),
        row.get("peak_gib"),
        calibrates,
        remark,
    )


def _iteration(row: Mapping[str, Any], arch: Architecture, sys: System) -> Run:
    full = row["recompute"] == "full"
    strategy = Strategy(
        gpus=row["gpus"],
        tp=row["tp"],
        pp=row["pp"],
        vp=row["vp"],
        micro_batch=row["mbs"],
        global_batch=row["gbs"],
        seq=row["seq"],
        precision=row["precision"],
        zero=0,
        recompute="full" if full else "selective",
        sequence_parallel=not full,
        attention="unfused",
        overlap_tp=False,
        overlap_pp=False,
    )
    name = f"{row['model']} {sys.name} {'full' if full else 'selective'}"
    return Run(name, "iteration", arch, sys, strategy, row["iteration_s"], row.get("source", ""))
