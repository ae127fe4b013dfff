"""What is asked of the service: a request rate, lengths, targets, and the pool that may be used; checked on reading."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from memfine_planner.files import read_mapping, validated

__all__ = ["Lengths", "Request", "Share", "Targets", "load_request"]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Lengths(BaseModel):
    """Requests of one kind: prompt and output tokens, and their weight in the mix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: int = Field(ge=1)
    output: int = Field(ge=1)
    weight: _Positive = 1.0


class Targets(BaseModel):
    """Limits that a fraction `percentile` keeps.

    Args:
        first_token_s: from arrival to the first token (queue and prefill).
        token_s: between two tokens.
        handover_s: from the first token until the cache lies in the decode instance; the mean prompt's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first_token_s: _Positive
    token_s: _Positive
    handover_s: _Positive = 1.0
    percentile: float = Field(default=0.9, gt=0, lt=1)


class Share(BaseModel):
    """Devices of one kind that may be used, and the price of one per hour."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: int = Field(ge=1)
    price: _Positive = 1.0


def _priced_alike(pool: dict[str, Share]) -> dict[str, Share]:
    """A price that is left out would count as 1 beside prices in money."""
    unpriced = [name for name, share in pool.items() if "price" not in share.model_fields_set]
    if 0 < len(unpriced) < len(pool):
        raise ValueError(f"expected a price for every accelerator or for none; none for {', '.join(unpriced)}")
    return pool


class Request(BaseModel):
    """A planning task.

    Args:
        rate: requests per second.
        pool: by accelerator name.
        sizes: tensor and pipeline parallel sizes that are tried.
        number, cache_bytes, expert_alpha: see `model.Model`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    rate: _Positive
    lengths: tuple[Lengths, ...] = Field(min_length=1)
    targets: Targets
    pool: Annotated[dict[str, Share], Field(min_length=1), AfterValidator(_priced_alike)]
    sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2, 4, 8), min_length=1)
    stages: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 2), min_length=1)
    number: str = Field(default="BF16", pattern="^(FP16|BF16|FP8|FP4)$")
    cache_bytes: _Positive = 2.0
    expert_alpha: float = Field(default=0.0, ge=0)


def load_request(path: Path, rate: float | None = None) -> Request:
    """The task of a YAML or JSON file, with another rate if one is given; ConfigError names every bad field."""
    loaded = read_mapping(path, "the task", "the fields model, rate, lengths, targets and pool")
    return validated(Request, loaded if rate is None else {**loaded, "rate": rate}, f"{path}: request")
