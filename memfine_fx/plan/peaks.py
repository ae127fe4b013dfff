"""Peaks of a run by rows a chunk, solved once for all regions and heads of a step.

Every region's plan is a bisection over the peak of the whole step, and asks for the same numbers of rows as the others.
Results are cached by memory context (sizes, bytes that are there, so whether gradients exist), as long as the compiled
functions' byte terms are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from memfine_fx.config import Config
from memfine_fx.memory.liveness import SavedRowCounts
from memfine_fx.memory.region_bytes import ChunkSize, RegionBytes
from memfine_fx.memory.step import GraphStep, RunMemory, StepPeak, step_peak, step_peak_bytes
from memfine_fx.plan.rows import knee_tokens, wanted_rows

__all__ = ["SolvedPeaks", "chunk_sizes", "peak_of_run", "revision_of", "unbounded_rows"]

_MOST_CONTEXTS = 256


@dataclass
class SolvedPeaks:
    """Peaks by memory context and by (rows, a head's tokens) a chunk; None where nothing of the run is known yet."""

    num_solved: int = 0
    _peaks: dict[Hashable, dict[tuple[int | None, int | None], int | None]] = field(default_factory=dict)
    _saving: dict[Hashable, SavedRowCounts] = field(default_factory=dict)

    def peak_of(self, config: Config, run: RunMemory) -> Callable[[int | None, int | None], int | None]:
        """(rows, a head's tokens) -> bytes of the run's peak beyond what is there before it."""
        key = (run.key, revision_of(run.step))
        if key not in self._peaks and len(self._peaks) >= _MOST_CONTEXTS:
            self._peaks.clear()
        known = self._peaks.setdefault(key, {})

        def peak(rows: int | None, head_tokens: int | None) -> int | None:
            if (rows, head_tokens) not in known:
                self.num_solved += 1
                sizes = chunk_sizes(config, run.step, rows, head_tokens)
                known[rows, head_tokens] = step_peak_bytes([run], sizes)
            return known[rows, head_tokens]

        return peak

    def run_with_saved_rows(self, run: RunMemory, needs: int, solve: Callable[[], RunMemory]) -> RunMemory:
        """Return a run with the rows that its regions save by `solve`, which is called once for each memory context.

        Args:
            needs: bytes that later runs of its pass are expected to take.
        """
        key = (run.key, needs, revision_of(run.step))
        if key not in self._saving:
            if len(self._saving) >= _MOST_CONTEXTS:
                self._saving.clear()
            self._saving[key] = solve().saved
        return replace(run, saved=self._saving[key])

    def forget(self) -> None:
        """More is known of a graph's memory than before."""
        self._peaks.clear()
        self._saving.clear()


def revision_of(step: GraphStep) -> int:
    """A number that changes with the byte terms of a step's regions: it only grows."""
    # Each only grows, so two sums are equal only if none of them has grown in between.
    return sum(region.revision() for region in step.regions.values())


def peak_of_run(config: Config, run: RunMemory, rows: int | None, head_tokens: int | None) -> StepPeak | None:
    """The peak of a run with its largest terms; None where nothing is known of it yet."""
    step = run.step
    return step_peak([run], chunk_sizes(config, step, rows, head_tokens))


def chunk_sizes(
    config: Config, step: GraphStep, rows: int | None, head_tokens: int | None
) -> Callable[[str, int], ChunkSize]:
    """Rows by region id: `rows` or `head_tokens` everywhere if given, else what a plan without a budget has."""

    def size_of(region_id: str, num_tokens: int) -> ChunkSize:
        if region_id in step.heads:
            return ChunkSize(config.tokens_per_head_chunk or head_tokens or knee_tokens(step.heads[region_id].terms))
        if rows is not None:
            return ChunkSize(rows)
        return ChunkSize(unbounded_rows(config, step.regions[region_id].terms_now("nothing"), num_tokens))

    return size_of


def unbounded_rows(config: Config, region: RegionBytes, num_tokens: int) -> int:
    """Rows a chunk (a slice's rows, on the tokens axis) that a region's plan without a budget has."""
    rows, _ = wanted_rows(
        region,
        num_tokens,
        axis=config.axis,
        rows_per_chunk=config.rows_per_chunk,
        tokens_per_chunk=config.tokens_per_chunk,
    )
    return rows
