"""Accelerators of several vendors: rates, memory and links of one device, from data/vendors.yaml with its sources.

A user's YAML or JSON file has the same form. A bad field is named with its file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from memfine_fx.errors import ConfigError
from memfine_planner.files import read_mapping, validated

__all__ = ["Accelerator", "builtin_accelerators", "load_accelerators"]

_DATA = Path(__file__).parent / "data" / "vendors.yaml"
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
NumberFormat = Literal["FP16", "BF16", "FP8", "FP4"]


class Accelerator(BaseModel):
    """One device with its links. Rates are dense; bandwidths are bytes/1e9 per second, per device and direction.

    Args:
        domain, domain_gb_per_s: devices that reach each other over the scale-up link, and its bandwidth.
        gemm_fraction: of the peak rate that large products reach, by number format.
        memory_fraction, link_fraction: of the bandwidths that are reached.
        layer_overhead_us: of launching a layer, and of each of its exchanges.
        block_tokens: tokens in a page of its KV cache.
        sources, checked: where the figures should be found; and by field ("tflops.FP8" for one of several) where they
            were read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    vendor: str
    tflops: dict[NumberFormat, _Positive] = Field(min_length=1)
    memory_gib: _Positive
    memory_gb_per_s: _Positive
    domain: int = Field(ge=1)
    domain_gb_per_s: _Positive
    network_gb_per_s: _Positive
    host_link_gb_per_s: _Positive
    gemm_fraction: dict[NumberFormat, _Fraction] = {}
    memory_fraction: _Fraction = 0.7
    link_fraction: _Fraction = 0.75
    layer_overhead_us: float = Field(default=20.0, ge=0)
    block_tokens: int = Field(default=16, ge=1)
    sources: tuple[str, ...] = ()
    checked: dict[str, str] = {}

    def __hash__(self) -> int:
        return hash(self.name)

    def flops_per_s(self, number: str) -> float:
        """Reached FLOP/s; formats that it lacks run in 16 bits.

        Raises:
            ConfigError: it has neither.
        """
        for name in (number, "BF16", "FP16"):
            for known, tflops in self.tflops.items():
                if known == name:
                    return tflops * 1e12 * self.gemm_fraction.get(known, 0.6)
        raise ConfigError(f"{self.name} has no {number} rate; known: {', '.join(self.tflops)}")

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gb_per_s * 1e9 * self.memory_fraction


@cache
def builtin_accelerators() -> dict[str, Accelerator]:
    """Those of data/vendors.yaml, by name."""
    return load_accelerators(_DATA)


def load_accelerators(path: Path) -> dict[str, Accelerator]:
    """All accelerators of a YAML or JSON file, by name; ConfigError names file and field."""
    loaded = read_mapping(path, "the accelerators", "a mapping from an accelerator's name to its fields")
    if not all(isinstance(fields, dict) for fields in loaded.values()):
        raise ConfigError(f"{path}: expected a mapping from an accelerator's name to its fields")
    return {
        str(name): validated(Accelerator, {**fields, "name": str(name)}, f"{path}: {name}")
        for name, fields in loaded.items()
    }
