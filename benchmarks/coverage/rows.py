"""One row of the coverage table."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Self

__all__ = [
    "EAGER_FACTOR",
    "EXPERTS_FUNCTION",
    "NOT_INSTALLED",
    "NO_FUNCTION",
    "ROUTING_REPLAY",
    "TOLERANCE",
    "CoverageRow",
    "MultimodalRow",
    "PackageRow",
    "VersionRow",
]

TOLERANCE = 1e-5
EAGER_FACTOR = 4.0
NOT_INSTALLED = "not installed"
EXPERTS_FUNCTION = "experts function"
ROUTING_REPLAY = "routing replay"
NO_FUNCTION = "transformers gives its experts no choice of a function"


@dataclass(frozen=True)
class CoverageRow:
    """What became of one model or spelling.

    Args:
        kind: "family" (of transformers), "experts function" (a family chunked by it alone), "routing replay" (a family
            under a routing that it is given), "spelling" (hand-written
            layer), "package" (a layer of a package) or "multimodal" (a deep model of transformers with images).
        name: family, spelling, or package and configuration.
        built: class that was built, "" where none could be.
        num_layers: layers of experts in it, by class name.
        num_graphs: graphs that Dynamo captured.
        num_found: routing decisions that lead to expert matmuls.
        num_raised: regions chunked.
        worst_error: of outputs and all gradients, relative to the unmodified model; None if it did not run.
        worst_name: where.
        exact_error: of that tensor, relative to the unmodified model in fp64; only where `worst_error` is large.
        eager_error: how far the unmodified model itself is from fp64 there, its parameters rounded in several ways.
        peak_ratio: peak bytes of a step beyond parameters and gradients, over those of the same captured graphs
            without rewriting.
        reasons: of what was refused, each once.
        uncompared: why chunked layers were not compared with the model's own code, each reason once.
        failure: why it could not be built or run, "" if it did.
    """

    kind: str
    name: str
    built: str = ""
    num_layers: int = 0
    num_graphs: int = 0
    num_found: int = 0
    num_raised: int = 0
    worst_error: float | None = None
    worst_name: str = ""
    exact_error: float | None = None
    eager_error: float | None = None
    peak_ratio: float | None = None
    reasons: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    failure: str = ""

    @property
    def is_whole(self) -> bool:
        """Every layer of experts is chunked, and exactly."""
        return self.is_exact and self.num_raised >= max(1, self.num_layers)

    @property
    def is_exact(self) -> bool:
        """Within 1e-5 of the unmodified model, or as close to fp64 as that model is where it is itself imprecise."""
        if self.worst_error is None or self.worst_error < TOLERANCE:
            return self.worst_error is not None
        if self.exact_error is None or self.eager_error is None:
            return False
        return self.exact_error <= EAGER_FACTOR * self.eager_error

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        fields = json.loads(line)
        return cls(**{**fields, **{name: tuple(fields.get(name, ())) for name in ("reasons", "uncompared")}})


@dataclass(frozen=True)
class PackageRow(CoverageRow):
    """A row of a layer as its package ships it.

    Args:
        package: its distribution on the registry.
        version: the installed one; where none is, the one that the entry was written for.
    """

    package: str = ""
    version: str = ""


@dataclass(frozen=True)
class MultimodalRow(CoverageRow):
    """A row of a deep multimodal model that is called with an image and text, and then with two images and more text.

    Its layers are counted by the shapes of their parameters, and its regions are counted in each of the two calls: the
    row has the smaller number.

    Args:
        num_plain_graphs: graphs that `torch.compile` with the same inner compiler has for the first call.
        num_later_graphs: graphs that the second call adds.
    """

    num_plain_graphs: int = 0
    num_later_graphs: int = 0


@dataclass(frozen=True)
class VersionRow(CoverageRow):
    """A row of a family in one version of transformers.

    Args:
        version: of transformers.
    """

    version: str = ""
