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

from memfine_fx.cluster.architectures import Architecture
from memfine_fx.cluster.model_configs import architecture, builtin_architectures
from memfine_fx.cluster.strategy import Strategy, with_fields
from memfine_fx.cluster.systems import System, system
from memfine_fx.errors import ConfigError

__all__ = ["Run", "load_runs", "preset", "published", "published_runs"]

_DATA = Path(__file__).parent / "data" / "published_runs.json"


@dataclass(frozen=True)
class Run:
    """One measured run.

    Args:
        kind: "throughput" (tokens/s/GPU) or "iteration" (seconds a step).
        measured: the published figure.
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


def preset(arch: Architecture, sys: System, vp: int) -> dict[str, Any]:
    """What current frameworks switch on by default for a model on a system.

    NVL72 systems run the fused hierarchical dispatcher; others the plain all-to-all, hidden behind the neighbouring
    micro-batch where the pipeline is interleaved. Presets for Blackwell capture partial CUDA graphs.
    """
    is_rack = sys.nvlink_domain > 8
    return {
        "dispatcher": "hierarchical" if is_rack else "alltoall",
        "cuda_graphs": "partial" if sys.generation == "blackwell" else "none",
        "overlap_ep": arch.is_moe and not is_rack and vp > 1,
        "grad_bytes": 2,
    }


def _runs(loaded: Mapping[str, Any], source: str) -> tuple[Run, ...]:
    own = loaded.get("architectures", {})
    found = []
    for kind, make in (("throughput", _throughput), ("iteration_time", _iteration)):
        for index, row in enumerate(loaded.get(kind, ())):
            try:
                name = row["model"]
                arch = architecture(name if name in builtin_architectures() or name not in own else own[name])
                found.append(make(row, arch, system(row["system"])))
            except KeyError as error:
                raise ConfigError(f"{source}: {kind}[{index}] lacks {error}") from None
    return tuple(found)


def _throughput(row: Mapping[str, Any], arch: Architecture, sys: System) -> Run:
    vp = row.get("vp") or 1
    options = preset(arch, sys, vp) | dict(row.get("settings", {}))
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
    remark = f"informed {row['informed']}" if "informed" in row else "contradicts itself: not fitted"
    return Run(
        name, "throughput", arch, sys, strategy, row["tokens_per_s_per_gpu"], row.get("source", ""), calibrates, remark
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
