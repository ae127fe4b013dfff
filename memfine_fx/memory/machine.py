"""Properties of this machine that measurements and formulas depend on, and the files that hold the measurements.

The CPU is asked for what oneDNN would use of it: its instructions, capped by ONEDNN_MAX_CPU_ISA as oneDNN caps them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from memfine_fx.config import cache_folder

__all__ = [
    "CpuFeatures",
    "DamagedFile",
    "cpu_features",
    "cpu_model",
    "features_of",
    "host_bytes",
    "load_measurement",
    "measurement_key",
    "number_between",
    "save_measurement",
]

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
_LADDER = ("avx512bw", "avx512bf16", "avx512fp16", "amxbf16", "amxfp16")
"""What changes the scratch of a kernel, each with all before it."""
_ALLOWED = {
    **dict.fromkeys(("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"), 0),
    **dict.fromkeys(("avx512_core", "avx512_core_vnni"), 1),
    "avx512_core_bf16": 2,
    **dict.fromkeys(("avx512_core_fp16", "avx10_1_512"), 3),
    **dict.fromkeys(("avx512_core_amx", "avx10_1_512_amx"), 4),
}
"""Names of ONEDNN_MAX_CPU_ISA -> how much of the ladder they leave; other names leave all of it."""


@dataclass(frozen=True)
class CpuFeatures:
    """The ways in which oneDNN multiplies matrices in low precision on a CPU.

    Args:
        bf16: "native" in instructions for bf16, "converted" to fp32 in blocks, "none" where it takes no such product.
        fp16: whether it multiplies fp16, in blocks converted to fp32.
        packs_bf16, packs_fp16: whether attention packs keys and values for AMX tiles.
    """

    bf16: Literal["none", "converted", "native"]
    fp16: bool
    packs_bf16: bool
    packs_fp16: bool


def features_of(instructions: Collection[str], max_isa: str = "") -> CpuFeatures:
    """The features of an x86 CPU with these instructions.

    Args:
        instructions: as /proc/cpuinfo or torch name them; underscores do not matter.
        max_isa: value of ONEDNN_MAX_CPU_ISA.
    """
    present = {name.replace("_", "") for name in instructions}
    allowed = _LADDER[: _ALLOWED.get(max_isa.lower(), len(_LADDER))]
    has = {name: name in present and name in allowed for name in _LADDER}
    return CpuFeatures(
        bf16="native" if has["avx512bf16"] else "converted" if has["avx512bw"] else "none",
        fp16=has["avx512fp16"],
        packs_bf16=has["amxbf16"],
        packs_fp16=has["amxfp16"],
    )


def cpu_features() -> CpuFeatures:
    """The features of this machine's CPU; of one that is no x86, those that need most without packing."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch gives no types
        return CpuFeatures("none", False, False, False)
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return CpuFeatures("native", True, False, False)
    return features_of(_instructions(), os.environ.get(_ISA_VARIABLES[0]) or os.environ.get(_ISA_VARIABLES[1], ""))


def cpu_model() -> str:
    """The CPU's name with its family and model, which hosts of virtual machines leave out of the name."""
    name = _cpuinfo("model name")
    if not name:
        return platform.processor() or platform.machine()
    family, model = _cpuinfo("cpu family"), _cpuinfo("model")
    return f"{name} (family {family}, model {model})" if family and model else name


def host_bytes() -> int:
    """Bytes of memory that the host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measurement_key(device_type: str, *parts: object) -> str:
    """A name for what was measured here: other hardware, instructions, threads or torch give another one."""
    if device_type == "cuda":
        device: tuple[object, ...] = (torch.cuda.get_device_name(),)
    else:
        limits = tuple(os.environ.get(name, "") for name in _ISA_VARIABLES)
        device = (cpu_model(), os.cpu_count(), cpu_features(), torch.backends.cpu.get_cpu_capability(), limits)
    text = repr((device_type, device, torch.get_num_threads(), torch.__version__, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class DamagedFile(ValueError):
    """A file holds something else than a measurement; it reaches the log only."""


def load_measurement(name: str, decode: Callable[[Any], ResultT]) -> ResultT | None:
    """Return what `save_measurement` wrote under this name, or None where it has to be measured.

    Args:
        decode: turns the JSON of the file into the measurement. It checks every field, because a file may be torn,
            edited or written by another version, and raises `DamagedFile` where one is wrong; what Python raises on
            JSON of another structure counts as well.
    """
    try:
        path = _path(name)
        content = path.read_bytes()
    except OSError:
        return None
    try:
        return decode(json.loads(content))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        _LOG.info("%s is damaged and is measured again: %s: %s", path, type(error).__name__, error)
        return None


def save_measurement(name: str, fields: object) -> None:
    """Write fields as JSON under this name.

    A reader sees the whole file or the one before, also while other processes write it and after one was killed: each
    writes a file of its own, which then takes the name. Where nothing can be written, one warning a process says so.
    """
    try:
        path = _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # process ids are the same in several containers
        try:
            part.write_text(json.dumps(fields), encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        _warn_not_saved(error)


def _warn_not_saved(error: OSError) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        _LOG.warning(
            "what memfine_fx measures of this machine cannot be saved (%s). The measurements serve this process, and "
            "each new process takes some seconds to measure again. Set the environment variable MEMFINE_CACHE to a "
            "folder that can be written",
            error,
        )


_has_warned = False


def number_between(value: object, least: float, most: float) -> float:
    """Return a number of a file as a float.

    Raises:
        DamagedFile: it is no number, or outside of this range; NaN and the infinities are outside of every range.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise DamagedFile(f"expected a number from {least:g} to {most:g}, got {str(value)[:40]}")
    return float(value)


def _path(name: str) -> Path:
    return Path(cache_folder()) / f"{name}.json"


def _instructions() -> Collection[str]:
    ask = getattr(torch.cpu, "get_capabilities", None)  # torch has it since a version after our oldest
    if ask is None:
        return _cpuinfo("flags").split()
    return [name for name, value in ask().items() if value is True]


@functools.cache  # one line for each of hundreds of processors is a long file
def _cpuinfo(field: str) -> str:
    """A field of the first processor in /proc/cpuinfo, "" where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field)
    return next(values, "")
