"""The results of `verify`: per region the worst errors of the rewritten form, and the controls behind them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from memfine_fx.records import Refusal, Where

__all__ = ["Check", "RegionVerification", "VerifyReport"]


@dataclass(frozen=True)
class Check:
    """One run of both forms on the same inputs.

    Args:
        routing: where the expert index came from: "captured", or the name of an adversarial routing.
        rows_per_chunk: R of the rewritten form.
        worst: the output or gradient that is furthest off, e.g. "output", "d hidden_states".
        error: its relative error against the reference.
        original_error: the original form's relative error of that tensor.
    """

    routing: str
    rows_per_chunk: int
    worst: str
    error: float
    original_error: float


@dataclass(frozen=True)
class RegionVerification:
    """One region, original against rewritten.

    Args:
        where: module path and source line of the region.
        family: its spelling.
        reference: precision of the reference both are measured against.
        tolerance: largest error accepted; where the original form is itself less exact, twice its error.
        checks: every run.
        identity_error: the control that must be 0.0: the outlined original against the value in the whole graph.
        corrupted_error: the control that must exceed the tolerance: one chunk of the rewritten form falsified;
            None when there was nothing to falsify (no tokens).
        failure: why the region does not pass; "" if it does.
    """

    where: Where
    family: str
    reference: str
    tolerance: float
    checks: tuple[Check, ...]
    identity_error: float
    corrupted_error: float | None
    failure: str = ""

    @property
    def has_passed(self) -> bool:
        return not self.failure

    @property
    def worst(self) -> Check | None:
        return max(self.checks, key=lambda check: check.error, default=None)

    def __str__(self) -> str:
        head = f"{'verified' if self.has_passed else 'FAILED  '} {self.where}: {self.family}"
        worst = self.worst
        if worst is None:
            return f"{head}; {self.failure}"
        caught = "-" if self.corrupted_error is None else f"{self.corrupted_error:.1e}"
        line = (
            f"{head}; worst {worst.error:.1e} ({worst.worst}, routing {worst.routing}, R={worst.rows_per_chunk}) of "
            f"{len(self.checks)} runs against {self.reference}; controls: identity {self.identity_error:.1e}, "
            f"corrupted chunk {caught}"
        )
        return f"{line}; {self.failure}" if self.failure else line


@dataclass(frozen=True)
class VerifyReport:
    """All regions of one call of a model.

    Args:
        regions: raised regions, in graph order.
        refused: what was not raised, and so not verified: it runs as it was written.
    """

    regions: tuple[RegionVerification, ...]
    refused: tuple[Refusal, ...]

    @property
    def has_passed(self) -> bool:
        """Every raised region agrees with its original, and every control did its work."""
        return all(region.has_passed for region in self.regions)

    @property
    def worst_error(self) -> float:
        return max((check.error for region in self.regions for check in region.checks), default=0.0)

    def __str__(self) -> str:
        num_passed = sum(region.has_passed for region in self.regions)
        head = f"memfine_fx: {num_passed} of {len(self.regions)} rewritten regions verified"
        lines = [f"  {region}" for region in self.regions]
        return "\n".join(
            [head, *lines, *(f"  refused  {refusal.where}: {refusal.details}" for refusal in self.refused)]
        )

    def to_json(self) -> str:
        """The report as a JSON document."""
        return json.dumps(dataclasses.asdict(self), indent=2)
