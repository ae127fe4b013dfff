"""Numbers of rows a chunk that a step may have, and what each costs in seconds beside the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memfine_fx.config import Config
from memfine_fx.memory.step import GraphStep, RegionMemory
from memfine_fx.plan.cost import STEP_FLOPS, DeviceRates, rows_seconds
from memfine_fx.plan.head_tokens import LEAST_TOKENS, knee_tokens
from memfine_fx.plan.peaks import unbounded_rows
from memfine_fx.plan.rows import LEAST_ROWS

__all__ = ["StepWork"]


@dataclass(frozen=True)
class StepWork:
    """What rows a chunk cost the regions of one step.

    Args:
        sizes: value of each symbol of the graph.
    """

    config: Config
    step: GraphStep
    sizes: Mapping[str, int]

    def rows_choices(self, rates: Callable[[], DeviceRates]) -> list[tuple[int | None, float]]:
        """(rows, seconds slower than with the first, which is as many as time asks for), most rows first."""
        if self.config.axis != "rows" or self.config.rows_per_chunk is not None:
            return [(None, 0.0)]
        most = max((self._unbounded(region) for region in self.step.regions.values()), default=1)
        halved = [most >> shift for shift in range(1, most.bit_length()) if most >> shift >= LEAST_ROWS]
        measured = rates()
        fastest = self._seconds(None, measured)
        return [(None, 0.0), *((rows, max(0.0, self._seconds(rows, measured) - fastest)) for rows in halved)]

    def head_tokens(self, rows: int | None) -> int | None:
        """Tokens of a head's chunk beside so many rows of the experts', fewer in the same proportion."""
        if rows is None:
            return None
        most = max((self._unbounded(region) for region in self.step.regions.values()), default=rows)
        knee = max((knee_tokens(head.terms) for head in self.step.heads.values()), default=rows)
        return max(LEAST_TOKENS, knee * rows // most)

    def _unbounded(self, region: RegionMemory) -> int:
        return unbounded_rows(self.config, region.terms_now("nothing"), region.tokens_at(self.sizes))

    def _seconds(self, rows: int | None, rates: DeviceRates) -> float:
        """Of all regions of this graph in one step."""
        seconds = 0.0
        for region in self.step.regions.values():
            terms = region.terms_now("nothing")
            seconds += rows_seconds(
                rates,
                num_routed=max(1, region.rows_at(self.sizes)),
                num_experts=terms.num_experts,
                flops_per_row=STEP_FLOPS * terms.flops_per_row,
                param_bytes=terms.param_bytes,
                rows=self._unbounded(region) if rows is None else rows,
                takes_group=terms.takes_group,
            )
        return seconds
