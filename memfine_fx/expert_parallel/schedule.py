"""Schedule the all-to-alls that send rows to their experts: a pure function of the count matrix.

Terms
    counts      [ep,E]: rows that each source rank has for each expert
    row order   the rows of one destination in (expert, source) order: one number line per destination
    position    a place in the row orders, [ep]: how many rows each destination has received so far
    round       positions advance by at most R rows, here of a round; what arrives is computed before the next round
    all-to-all  a round has several only where a source would have to stage too many rows at once

1. A destination's row order is its experts in order, each expert's rows in blocks, each block source by source, its own
   first and then the next rank's and so on: with even routing every source sends to another destination at any time,
   and about R rows a round. A block has an equal part of each source's rows, so that under skew, where positions meet
   the sources at different times, an all-to-all still has rows of them all; where experts have few rows, each is one
   block. Experts come one after the other, so their weights are read once and their gradients are complete when the
   position has passed them.
2. Round i takes each destination from row i*R to row (i+1)*R. No rank receives more than its R, whatever the routing,
   and the number of rounds is the largest of ceil(rows / R). Where ranks save rows for backward, the first rounds are
   saved, as many as every rank has room for, and those after them have half as many rows: in backward their rows are
   received again beside what is saved, and beside the gradients that are received in any round.
3. How many rows of (source, expert) have gone at a position is, block by block, a clamp of the position by where they
   begin in the row order.
   So the rows of an expert that a source sends in an all-to-all are one range, and all split sizes of all ranks follow.
4. A round in which a source would stage more than its `max_sent` rows is cut in all-to-alls, as few as do, down to one
   row a destination. Receivers gather the all-to-alls of a round in one buffer, and chunks are cut there.

Every rank computes this from the same gathered matrix. Nothing is agreed upon, so nothing can be disagreed about.

`TokenSlices` is the paper's way (arXiv 2511.21431, section 3) under the same protocol, for comparison: a slice of every
rank's tokens a round. It bounds what a rank receives only if slices have equal shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from memfine_fx.expert_parallel.placement import Placement

__all__ = ["AllToAll", "Rounds", "Schedule", "TokenSlices"]

_MOST_ENTRIES = 1 << 22
"""Most counts that are processed at once where every source's rows of every round are computed."""
_MOST_BLOCKS = 6
"""Most blocks of an expert's rows; more would only take longer to schedule."""


@dataclass(frozen=True)
class AllToAll:
    """One exchange, as one rank sees it.

    Args:
        first, last: [E]: of this rank's rows of an expert, those from `first` to `last` are sent.
        received: [ep,E_local]: rows that are received, by source and own expert.
        sent_splits, received_splits: rows to and from each rank.
    """

    first: torch.Tensor
    last: torch.Tensor
    received: torch.Tensor
    sent_splits: list[int]
    received_splits: list[int]

    @property
    def num_sent(self) -> int:
        return sum(self.sent_splits)

    @property
    def num_received(self) -> int:
        return sum(self.received_splits)


class Schedule(Protocol):
    """Rounds of one layer in one step."""

    @property
    def num_rounds(self) -> int: ...

    def all_to_alls(self, rank: int, number: int) -> list[AllToAll]:
        """Return the exchanges of round `number` as `rank` sees them."""
        ...

    def received_before(self, rank: int, number: int) -> torch.Tensor:
        """Return the rows of each own expert that are received before round `number`, [E_local]."""
        ...

    @property
    def num_saved(self) -> int:
        """Return how many rounds, from the first on, every rank has room to save."""
        ...


class Rounds:
    """Rounds of at most R received rows a rank.

    Args:
        counts: [ep,E] int64 on the host.
        placement: of the experts.
        rows_per_round: R, or R of each rank.
        max_sent: rows that a rank may stage for one all-to-all, or those of each rank, as far as all-to-alls can be
            cut.
        rooms: rows that each rank can save; empty where nothing is saved.
    """

    def __init__(
        self,
        counts: torch.Tensor,
        placement: Placement,
        rows_per_round: int | Sequence[int],
        max_sent: int | Sequence[int],
        rooms: Sequence[int] = (),
    ) -> None:
        num_ranks = placement.num_ranks
        limits = [rows_per_round] * num_ranks if isinstance(rows_per_round, int) else list(rows_per_round)
        staged = [max_sent] * num_ranks if isinstance(max_sent, int) else list(max_sent)
        assert counts.shape == (num_ranks, placement.num_experts) and len(limits) == num_ranks
        assert min(limits) > 0, "a rank that receives no row at all would never be done"
        self.counts, self.placement = counts, placement
        self._max_sent = torch.tensor(staged, dtype=torch.int64)
        self._limits = torch.tensor(limits, dtype=torch.int64)
        self._rooms = torch.tensor(list(rooms) or [0] * num_ranks, dtype=torch.int64)
        self._later_limits = torch.where((self._rooms > 0).any(), (self._limits + 1) // 2, self._limits)
        self._owners = placement.owners()
        self._latest_view: tuple[int, tuple[list[list[AllToAll]], torch.Tensor]] | None = None

    @cached_property
    def received(self) -> torch.Tensor:
        """Return the rows that each rank receives in all rounds, [ep]."""
        return self.placement.by_rank(self.counts.sum(dim=0))

    @cached_property
    def num_rounds(self) -> int:
        first = _ceil_div(self.received, self._limits).clamp(max=self._most_saved)
        left = (self.received - self._most_saved * self._limits).clamp(min=0)
        return int((first + _ceil_div(left, self._later_limits)).max())

    @property
    def num_saved(self) -> int:
        return min(self.num_rounds, self._most_saved)

    @cached_property
    def _most_saved(self) -> int:
        """Return how many rounds every rank could save: all, where each has room for all its rows."""
        is_short = self.received > self._rooms
        if not bool(is_short.any()):
            return int(_ceil_div(self.received, self._limits).max())
        return int(torch.div(self._rooms, self._limits, rounding_mode="floor")[is_short].min())

    def _round_begins(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the positions before rounds of these numbers [n]: [n,ep]."""
        saved, later = numbers.clamp(max=self._most_saved), (numbers - self._most_saved).clamp(min=0)
        return saved.unsqueeze(1) * self._limits + later.unsqueeze(1) * self._later_limits

    @cached_property
    def _blocks(self) -> torch.Tensor:
        """Return the rows of (source, expert) in each block of the expert's rows, [B,ep,E]."""
        most, staged = int(self.counts.sum(dim=0).max()) if self.counts.numel() else 0, int(self._max_sent.min())
        num_blocks = min(_MOST_BLOCKS, max(1, -(-2 * most // max(1, staged))))
        bounds = torch.arange(num_blocks + 1).view(-1, 1, 1)
        return torch.div(bounds * self.counts, num_blocks, rounding_mode="floor").diff(dim=0)

    @cached_property
    def _begins(self) -> torch.Tensor:
        """Return the positions at which rows of (block, source, expert) begin in the owner's row order, [B,ep,E]."""
        num_ranks = self.placement.num_ranks
        sources = (self._owners.unsqueeze(1) + torch.arange(num_ranks)) % num_ranks  # [E,ep], in row order
        order = sources.unsqueeze(1).expand(-1, len(self._blocks), -1)
        ordered = self._blocks.permute(2, 0, 1).gather(2, order)  # [E,B,ep]
        ends = ordered.flatten().cumsum(0).view_as(ordered)
        order_begins = self.received.cumsum(0) - self.received
        begins = ends - ordered - order_begins[self._owners].view(-1, 1, 1)
        return torch.empty_like(begins).scatter_(2, order, begins).permute(1, 2, 0)

    def _gone(self, positions: torch.Tensor, sources: slice, experts: slice) -> torch.Tensor:
        """Return the rows of (source, expert) that are sent before `positions` [P,ep]: [P,S,E']."""
        at = positions[:, self._owners[experts]].unsqueeze(1)
        gone = torch.zeros((), dtype=torch.int64)
        for begins, rows in zip(self._begins[:, sources, experts], self._blocks[:, sources, experts], strict=True):
            gone = gone + torch.minimum((at - begins).clamp_(min=0), rows)
        return gone

    def _positions(self, number: int, num_all_to_alls: int) -> torch.Tensor:
        """Return the positions before, between and after the all-to-alls of a round, [num_all_to_alls+1,ep].

        An all-to-all is an equal part of what each rank receives in the round: were it one of R, ranks with fewer rows
        would all be served by the first all-to-alls.
        """
        parts = torch.arange(num_all_to_alls + 1).unsqueeze(1)
        bounds = torch.minimum(self._round_begins(torch.tensor([number, number + 1])), self.received)
        return bounds[:1] + torch.div(bounds.diff(dim=0) * parts, num_all_to_alls, rounding_mode="floor")

    @cached_property
    def _num_all_to_alls(self) -> list[int]:
        """Return for each round the fewest exchanges in which every source sends at most `max_sent` rows."""
        if bool((self.counts.sum(dim=1).clamp(max=int(self._limits.sum())) <= self._max_sent).all()):
            return [1] * self.num_rounds
        return [self._fewest_all_to_alls(number, most) for number, most in enumerate(self._most_stages())]

    def _most_stages(self) -> list[int]:
        """Return for each round the largest quotient, rounded up, of a source's sent rows and its `max_sent`."""
        rounds = self._round_begins(torch.arange(self.num_rounds + 1))
        everything = slice(None)
        at_once = max(1, _MOST_ENTRIES // max(1, self.counts.numel()))
        gone = torch.cat([self._gone(some, everything, everything).sum(dim=2) for some in torch.split(rounds, at_once)])
        most: list[int] = self._stages(gone).max(dim=1).values.tolist() if self.num_rounds else []
        return most

    def _stages(self, gone: torch.Tensor) -> torch.Tensor:
        """Return sent rows over `max_sent`, rounded up, between counts of rows sent by each source [P,ep]: [P-1,ep]."""
        return _ceil_div(gone.diff(dim=0), self._max_sent)

    def _fewest_all_to_alls(self, number: int, stages: int) -> int:
        most_received, everything = int(self._limits.max()), slice(None)
        num_all_to_alls = 1
        while num_all_to_alls < most_received and stages > 1:
            num_all_to_alls = min(max(stages, num_all_to_alls + 1 + num_all_to_alls // 4), most_received)
            gone = self._gone(self._positions(number, num_all_to_alls), everything, everything).sum(dim=2)
            stages = int(self._stages(gone).max())
        return num_all_to_alls

    def all_to_alls(self, rank: int, number: int) -> list[AllToAll]:
        return self._seen_by(rank)[0][number]

    def received_before(self, rank: int, number: int) -> torch.Tensor:
        return self._seen_by(rank)[1][number]

    def _seen_by(self, rank: int) -> tuple[list[list[AllToAll]], torch.Tensor]:
        """Return all rounds as one rank sees them, and the rows that it receives before each, [rounds+1,E_local].

        They are computed at once: a few array operations, not a few per round.
        """
        if self._latest_view is not None and self._latest_view[0] == rank:
            return self._latest_view[1]
        own, everything = _slice(self.placement.owned(rank)), slice(None)
        num_all_to_alls = self._num_all_to_alls
        parts = [self._positions(number, count)[:-1] for number, count in enumerate(num_all_to_alls)]
        positions = torch.cat([*parts, self._round_begins(torch.tensor([self.num_rounds]))])
        sent = self._gone(positions, slice(rank, rank + 1), everything)[:, 0]
        received = self._gone(positions, everything, own)
        all_to_alls = iter(_all_to_alls(self.placement, sent, received))
        firsts = torch.tensor([0, *num_all_to_alls]).cumsum(0)
        view = [[next(all_to_alls) for _ in range(count)] for count in num_all_to_alls], received.sum(dim=1)[firsts]
        self._latest_view = rank, view
        return view


class TokenSlices:
    """The paper's chunks: a round carries the rows of one slice of every rank's tokens.

    Args:
        bounds: [c+1,ep,E]: rows of (source, expert) in the slices before each bound.
        placement: of the experts.
    """

    def __init__(self, bounds: torch.Tensor, placement: Placement) -> None:
        self._bounds, self.placement = bounds, placement

    @property
    def num_rounds(self) -> int:
        return len(self._bounds) - 1

    def all_to_alls(self, rank: int, number: int) -> list[AllToAll]:
        bounds = self._bounds[number : number + 2]
        return list(_all_to_alls(self.placement, bounds[:, rank], bounds[:, :, _slice(self.placement.owned(rank))]))

    def received_before(self, rank: int, number: int) -> torch.Tensor:
        return self._bounds[number][:, _slice(self.placement.owned(rank))].sum(dim=0)

    @property
    def num_saved(self) -> int:
        return 0


def _ceil_div(values: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.div(values + by - 1, by, rounding_mode="floor")


def _slice(experts: range) -> slice:
    return slice(experts.start, experts.stop)


def _all_to_alls(placement: Placement, sent: torch.Tensor, received: torch.Tensor) -> Iterator[AllToAll]:
    """Yield the all-to-alls between consecutive counts of rows so far: `sent` [P,E], `received` [P,ep,E_local]."""
    received_in_each = received.diff(dim=0)
    sent_splits = placement.by_rank(sent.diff(dim=0)).tolist()
    received_splits = received_in_each.sum(dim=2).tolist()
    for number, splits in enumerate(zip(sent_splits, received_splits, strict=True)):
        yield AllToAll(sent[number], sent[number + 1], received_in_each[number], *splits)
