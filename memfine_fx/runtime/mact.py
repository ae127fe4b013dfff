"""How many chunks this step's rows get: the plan's rows against the rows that came (MACT, arXiv 2511.21431).

Terms
    plan's rows   the most rows that a chunk may have, the paper's s'_max; decided by the planner from shapes
    received      rows of this layer in this step, the paper's s''
    required      the fewest chunks that keep every chunk within the plan's rows
    in use        the chunks that a step runs with: required, or more while it has only just fallen

Exact mode takes what is required. With bins the number of chunks is raised to the next bin, as in the paper. A rise
is followed at once, because memory demands it; a fall only after `patience` steps in a row, and then to the largest
number that those steps required, so that routing which hovers between two numbers does not flap.

Rows axis: a chunk has at most the plan's rows whatever the routing, and the schedule follows the row counts. In exact
mode groups of experts are packed so that their chunks are as even as the same number of chunks allows.
Tokens axis: the plan's slice is safe for any routing, one row of an expert for each token. The rows that came usually
allow larger slices: the fewest are searched whose largest expert keeps within the plan's rows. The paper's
c = ceil(s'' / s'_max) is where the search begins; under skew it alone bounds nothing.

Backward takes the chunks that the latest forward decided where they are of the same rows under the same plan, and
decides again where they are not. All of it is arithmetic on E counts (tokens axis: a search in N sorted keys). Nothing
is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from memfine_fx.memory.closed_form import snap_to_bins
from memfine_fx.records import ChunkPlan
from memfine_fx.runtime.routing import SliceCounter
from memfine_fx.runtime.schedule import Chunk, even_rows, rows_schedule, tokens_schedule

__all__ = ["PATIENCE", "ChunkTuner", "Settled"]

PATIENCE = 4
"""Steps in a row that must ask for fewer chunks before fewer are used. A rise is urgent, because memory demands it; too
many chunks for a few steps cost a little time only, and routing that hovers would else change them in every step."""


@dataclass
class Settled:
    """A number that rises at once and falls late.

    Args:
        patience: steps in a row that must ask for less before it falls.
    """

    patience: int
    in_use: int = 0
    _recent: list[int] = field(default_factory=list)

    def settle(self, required: int) -> int:
        """The number for a step that needs `required`."""
        if required >= self.in_use:
            self.in_use = required
            self._recent.clear()
            return required
        self._recent.append(required)
        if len(self._recent) >= self.patience:
            self.in_use = max(self._recent)
            self._recent.clear()
        return self.in_use


@dataclass
class ChunkTuner:
    """Chunks of one region, step by step.

    Args:
        bins: allowed numbers of chunks, or None for exact mode.
        patience: see `Settled`.
        keeps_slices: use the plan's token slices as they are, because the user fixed them.
    """

    bins: tuple[int, ...] | None = None
    patience: int = field(default_factory=lambda: PATIENCE)
    keeps_slices: bool = False
    _settled: Settled = field(init=False)
    _even_rows: int = field(init=False, default=0)
    _last: tuple[object, list[Chunk]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._settled = Settled(self.patience)

    def chunks(
        self,
        plan: ChunkPlan,
        order: torch.Tensor,
        offsets: torch.Tensor,
        *,
        top_k: int,
        num_tokens: int,
        groups: bool,
        is_new_step: bool,
    ) -> list[Chunk]:
        """This step's chunks, none with more than the plan's rows.

        Args:
            plan: the planner's.
            order, offsets: from `routing.sort_assignments`.
            groups: whether a chunk may hold several whole experts.
            is_new_step: False where an earlier step's rows are walked again (backward).
        """
        ends = offsets.tolist()
        # NOTE: were another order to come to stand at this address with the same counts, the slices cut for the first
        # would still hold each row once and keep within the plan; they would only not be slices of tokens.
        key = (plan, tuple(ends), order.data_ptr())
        if not is_new_step and self._last is not None and self._last[0] == key:
            return self._last[1]
        if plan.axis == "rows":
            chunks = self._rows_chunks(plan, ends, groups=groups, is_new_step=is_new_step)
        else:
            chunks = self._token_chunks(plan, order, offsets, top_k, num_tokens, is_new_step=is_new_step)
        self._last = (key, chunks)
        return chunks

    def _rows_chunks(self, plan: ChunkPlan, ends: Sequence[int], *, groups: bool, is_new_step: bool) -> list[Chunk]:
        rows = plan.rows_per_chunk
        if self.bins is not None:
            received = max(1, ends[-1] - ends[0])
            required = snap_to_bins(-(-received // rows), self.bins)
            return rows_schedule(ends, -(-received // self._in_use(required, is_new_step)), groups=groups)
        if not groups:
            return rows_schedule(ends, rows, groups=False)
        self._even_rows = even_rows(ends, rows, self._even_rows)
        return rows_schedule(ends, self._even_rows, groups=True)

    def _token_chunks(
        self,
        plan: ChunkPlan,
        order: torch.Tensor,
        offsets: torch.Tensor,
        top_k: int,
        num_tokens: int,
        *,
        is_new_step: bool,
    ) -> list[Chunk]:
        counter = SliceCounter(order, offsets, top_k, num_tokens)
        if self.keeps_slices:
            return tokens_schedule(counter.bounds(plan.tokens_per_chunk).tolist())
        required, bounds = self._fewest(counter, plan, 1)
        in_use = self._in_use(required, is_new_step)
        if in_use > required:  # more slices are not always smaller ones: they are cut elsewhere
            _, bounds = self._fewest(counter, plan, in_use)
        return tokens_schedule(bounds.tolist())

    def _in_use(self, required: int, is_new_step: bool) -> int:
        return self._settled.settle(required) if is_new_step else max(required, self._settled.in_use)

    def _fewest(self, counter: SliceCounter, plan: ChunkPlan, at_least: int) -> tuple[int, torch.Tensor]:
        """(number, bounds) of at least so many slices whose largest expert keeps within the plan's rows."""
        # It ends: each turn cuts more slices, and slices as small as the plan's are within its rows for any routing.
        num_slices = max(at_least, -(-counter.largest_expert // plan.rows_per_chunk))
        while True:
            if self.bins is not None:
                num_slices = snap_to_bins(num_slices, self.bins)
            size = max(1, -(-counter.num_tokens // num_slices))
            bounds = counter.bounds(size)
            largest = int(bounds.diff(dim=0).max()) if len(bounds) > 1 else 0
            if largest <= plan.rows_per_chunk or size <= plan.tokens_per_chunk:
                return num_slices, bounds
            num_slices = max(num_slices + 1, num_slices * largest // plan.rows_per_chunk)
