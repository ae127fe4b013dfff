"""What it runs on: GPU rates, memory, links and storage of one cluster, validated.

Built-in systems live in data/systems.yaml with their sources; a user's YAML or JSON file has the same form. Files
are loaded safely, and a bad value is named with its line.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memfine_fx.errors import ConfigError
from memfine_planner.files import problem_texts, read_text

__all__ = ["System", "builtin_systems", "load_systems", "system", "system_from_fields"]

_DATA = Path(__file__).parent / "data" / "systems.yaml"
_ALIASES = {"A100": "A100-80GB"}


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class System(BaseModel):
    """One cluster of equal GPUs. Rates are dense; bandwidths are bytes/1e9 per second, per GPU and direction.

    Args:
        memory_gib: what the driver reports, in 2^30 bytes.
        sustained_factor, attention_factor: matrix and attention rates that this GPU sustains relative to the others of
            its generation (power limit, exponentials per second).
        nvlink_domain: GPUs that reach each other over NVLink.
        host_link_gb_per_s: GPU to host memory.
        storage_gb_per_s_per_gpu: share of the checkpoint storage's bandwidth.
        cpu: kind of host, which decides how fast kernels are launched.
        sources, checked: where the figures should be found; and by field ("tflops.FP8" for one of several) where they
            were read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    gpu: str
    generation: Literal["ampere", "hopper", "blackwell"]
    cpu: Literal["x86", "grace"] = "x86"
    tflops: dict[Literal["FP16", "BF16", "FP8", "FP4"], _Positive] = Field(min_length=1)
    memory_gib: _Positive
    memory_gb_per_s: _Positive
    sustained_factor: _Positive = 1.0
    attention_factor: _Positive = 1.0
    nvlink_domain: int = Field(ge=1)
    nvlink_gb_per_s: _Positive
    network_gb_per_s: _Positive
    host_link_gb_per_s: _Positive
    storage_gb_per_s_per_gpu: _Positive = 0.1
    sources: tuple[str, ...] = ()
    checked: dict[str, str] = {}

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30

    def rate(self, number: str) -> float:
        """FLOP/s of a number format; ConfigError when the GPU has no such units."""
        for name, tflops in self.tflops.items():
            if name == number:
                return tflops * 1e12
        raise ConfigError(f"{self.name} has no {number} rate; known: {', '.join(self.tflops)}")


@cache
def builtin_systems() -> dict[str, System]:
    """The built-in systems by name."""
    return load_systems(_DATA)


def system(name: str | Path | System) -> System:
    """A System from a built-in name or from a YAML or JSON file that holds one.

    Raises:
        ConfigError: unknown name (the known ones are listed) or a bad file.
    """
    if isinstance(name, System):
        return name
    text = str(name)
    if text.endswith((".yaml", ".yml", ".json")):
        loaded = load_systems(Path(text))
        if len(loaded) != 1:
            raise ConfigError(f"{text} holds {len(loaded)} systems; expected one")
        return next(iter(loaded.values()))
    known = builtin_systems()
    text = _ALIASES.get(text, text)
    for key, value in known.items():
        if key.lower() == text.lower():
            return value
    raise ConfigError(f"unknown system {text!r}; known: {', '.join(known)}; or a path to a .yaml or .json file")


def load_systems(path: Path) -> dict[str, System]:
    """All systems of a YAML or JSON file, by name: a mapping from name to fields."""
    text = read_text(path, "the system file")
    try:
        loaded = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from error
    lines = _lines_of(node, (), path)
    if not isinstance(loaded, dict) or not all(isinstance(fields, dict) for fields in loaded.values()):
        raise ConfigError(f"{path}: expected a mapping from a system's name to its fields")
    return {str(name): _validated(path, str(name), fields, lines) for name, fields in loaded.items()}


def system_from_fields(name: str, fields: Any, where: Path) -> System:
    """A System of a file that holds other things too; ConfigError names the file and the field."""
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: {name}: expected a system's fields (got {fields!r})")
    return _validated(where, name, fields, {})


def _validated(path: Path, name: str, fields: dict[str, Any], lines: dict[tuple[str, ...], int]) -> System:
    try:
        return System.model_validate({**fields, "name": name})
    except ValidationError as error:
        problems = []
        for location, text in problem_texts(error):
            at = max((key for key in lines if (name, *location)[: len(key)] == key), key=len, default=(name,))
            problems.append(f"{path}:{lines.get(at, 1)}: {name}{text}")
        raise ConfigError("\n".join(problems)) from None


def _lines_of(node: yaml.Node | None, at: tuple[str, ...], path: Path) -> dict[tuple[str, ...], int]:
    """Line number of every key of nested mappings; ConfigError when one is given twice."""
    found: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here, line = (*at, str(key.value)), key.start_mark.line + 1
            if here in found:
                raise ConfigError(f"{path}:{line}: {'.'.join(here)} is given twice, first in line {found[here]}")
            found[here] = line
            found.update(_lines_of(value, here, path))
    return found
