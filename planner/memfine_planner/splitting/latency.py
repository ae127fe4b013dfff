"""How long a round of split federated training takes, by device, cut and shares.

In a round every device fetches its side of the model, trains on its samples batch by batch with the server's side at
the other end of the link, and returns its side for averaging. The round ends with the slowest device. With a share s
of the server's arithmetic and w of its link, a device with a cut takes

    a + b / s + c / w   seconds:
    a   its own arithmetic,
    b   the server's side at the server's full rate,
    c   activations, their gradients and the device's parameters, both ways, over the whole link.

A backward pass counts twice its forward (three passes in all), as training estimates commonly do. Labels, and the
latency of a message, are left out.

User files are checked field by field; an error names the file and the field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from memfine_fx.errors import ConfigError
from memfine_planner.files import read_mapping, validated
from memfine_planner.splitting.graph import Cut

__all__ = ["Device", "Fleet", "Offers", "Server", "load_fleet", "offers", "seconds"]

_PASSES = 3.0
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Device(BaseModel):
    """A client: what it has, what it trains on, and what it lets be seen.

    Args:
        flops_per_s: FLOP/s that it sustains in training.
        link_bytes_per_s: its own link, each way; it can use no larger part of the server's.
        samples: trained on in a round.
        max_leakage: largest leakage of a cut that it accepts, in [0, 1].
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    flops_per_s: _Positive
    link_bytes_per_s: _Positive
    samples: int = Field(ge=1)
    max_leakage: float = Field(default=1.0, ge=0, le=1)


class Server(BaseModel):
    """The edge server: FLOP/s that it sustains, and its link, each way, both shared by all devices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flops_per_s: _Positive
    link_bytes_per_s: _Positive


def _named_apart(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    twice = [name for name, count in Counter(device.name for device in devices).items() if count > 1]
    if twice:
        raise ValueError(f"expected names that differ; {', '.join(twice)} is given more than once")
    return devices


class Fleet(BaseModel):
    """A server with its devices, and optionally the leakage of each cut by the name of its graph node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: Server
    devices: Annotated[tuple[Device, ...], Field(min_length=1), AfterValidator(_named_apart)]
    leakage: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}


@dataclass(frozen=True)
class Offers:
    """What one device may choose from: a, b, c (seconds, see the module) of its permitted cuts.

    Args:
        cuts: index of each in the model's list.
        cap: largest part of the server's link that its own link can use.
    """

    cuts: tuple[int, ...]
    a: NDArray[np.float64]
    b: NDArray[np.float64]
    c: NDArray[np.float64]
    cap: float

    def only(self, position: int) -> Offers:
        """The same with one cut left."""
        at = slice(position, position + 1)
        return Offers(self.cuts[at], self.a[at], self.b[at], self.c[at], self.cap)


def offers(cuts: Sequence[Cut], device: Device, server: Server, leakage: Sequence[float] = ()) -> Offers:
    """The permitted cuts of a device with their seconds; known to the device alone.

    Args:
        leakage: of every cut, in the order of `cuts`; without it all cuts are permitted.

    Raises:
        ConfigError: no cut leaks as little as the device demands.
    """
    permitted = [i for i in range(len(cuts)) if not leakage or leakage[i] <= device.max_leakage]
    if not permitted:
        raise ConfigError(
            f"device {device.name}: max_leakage={device.max_leakage:g} permits no cut; the least leaks {min(leakage):g}"
        )
    chosen = [cuts[i] for i in permitted]
    work = _PASSES * device.samples
    per_sample = [one.activation_bytes + one.gradient_bytes for one in chosen]
    sent = [
        device.samples * bytes_ + 2 * one.device_parameter_bytes for bytes_, one in zip(per_sample, chosen, strict=True)
    ]
    return Offers(
        tuple(permitted),
        np.array([work * one.device_flops / device.flops_per_s for one in chosen]),
        np.array([work * one.server_flops / server.flops_per_s for one in chosen]),
        np.array(sent) / server.link_bytes_per_s,
        min(1.0, device.link_bytes_per_s / server.link_bytes_per_s),
    )


def seconds(one: Offers, position: int, server_share: float, link_share: float) -> float:
    """The device's round with the cut at `position` of its offers; infinite where a needed share is 0."""
    total = float(one.a[position])
    for needed, share in ((one.b[position], server_share), (one.c[position], min(link_share, one.cap))):
        if needed > 0:
            total += float(needed) / share if share > 0 else np.inf
    return total


def load_fleet(path: Path) -> Fleet:
    """The fleet of a YAML or JSON file; ConfigError names every bad field."""
    return validated(Fleet, read_mapping(path, "the fleet", "the fields server and devices"), f"{path}: fleet")
