"""The order in which rows travel to their experts: a pure function of the count matrix.

Terms
    counts      [ep,E]: rows that each source rank has for each expert
    walk        the rows of one destination in (expert, source) order: one number line per destination
    position    a place on the walks, [ep]: how many rows each destination has received so far
    round       walks advance by at most R rows; what arrives is computed before the next round
    leg         one exchange; a round has several only where a source would have to stage too many rows at once

1. A destination's walk is its experts in order, each expert's rows source by source, its own first and then the next
   rank's and so on: with even routing every source sends to another destination at any time, and about R rows a round.
   Experts come one after the other, so their weights are read once and their gradients are complete when the walk has
   passed.
2. Round i takes each destination from row i*R to row (i+1)*R. No rank receives more than its R, whatever the routing,
   and the number of rounds is the largest of ceil(rows / R).
3. How many rows of (source, expert) have gone at a position is a clamp of the position by where they begin on the walk.
   So the rows of an expert that a source sends in a leg are one range, and all split sizes of all ranks follow.
4. A round whose busiest source would stage more than `max_sent` rows is cut in 2, 4, ... legs, down to one row a
   destination. Receivers gather the legs of a round in one buffer.

Every rank computes this from the same gathered matrix. Nothing is agreed upon, so nothing can be disagreed about.

`TokenSlices` is the paper's way (arXiv 2511.21431, section 3) under the same protocol, for comparison: a slice of every
rank's tokens a round. It bounds what a rank receives only if slices have equal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from memfine_fx.expert_parallel.placement import Placement

__all__ = ["Leg", "Rounds", "Schedule", "TokenSlices"]


@dataclass(frozen=True)
class Leg:
    """One exchange, as one rank sees it.

    Args:
        first, last: [E]: of this rank's rows of an expert, those from `first` to `last` are sent.
        received: [ep,E_local]: rows that come, by source and own expert.
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

    def legs(self, rank: int, number: int) -> list[Leg]:
        """The exchanges of round `number` as `rank` sees them."""
        ...

    def received_before(self, rank: int, number: int) -> torch.Tensor:
        """[E_local]: rows of each own expert that came before round `number`."""
        ...


class Rounds:
    """Rounds of at most R received rows a rank.

    Args:
        counts: [ep,E] int64 on the host.
        placement: of the experts.
        rows_per_round: R, or R of each rank.
        max_sent: rows that a rank may stage for one leg, as far as legs can be cut.
    """

    def __init__(
        self, counts: torch.Tensor, placement: Placement, rows_per_round: int | Sequence[int], max_sent: int
    ) -> None:
        num_ranks = placement.num_ranks
        limits = [rows_per_round] * num_ranks if isinstance(rows_per_round, int) else list(rows_per_round)
        assert counts.shape == (num_ranks, placement.num_experts) and len(limits) == num_ranks
        assert min(limits) > 0, "a rank that receives no row at all would never be done"
        self.counts, self.placement, self.max_sent = counts, placement, max_sent
        self._limits = torch.tensor(limits, dtype=torch.int64)
        self._owners = placement.owners()

    @cached_property
    def received(self) -> torch.Tensor:
        """[ep]: rows that each rank receives in all."""
        return self.placement.by_rank(self.counts.sum(dim=0))

    @cached_property
    def num_rounds(self) -> int:
        needed = torch.div(self.received + self._limits - 1, self._limits, rounding_mode="floor")
        return int(needed.max())

    @cached_property
    def _begins(self) -> torch.Tensor:
        """[ep,E]: where the rows of (source, expert) begin on the walk of the expert's owner."""
        num_ranks = self.placement.num_ranks
        sources = (self._owners.unsqueeze(1) + torch.arange(num_ranks)) % num_ranks  # [E,ep], in walking order
        walked = self.counts.t().gather(1, sources)
        ends = walked.flatten().cumsum(0).view_as(walked)
        walk_begins = self.received.cumsum(0) - self.received
        begins = ends - walked - walk_begins[self._owners].unsqueeze(1)
        return torch.empty_like(begins).scatter_(1, sources, begins).t()

    def _gone(self, position: torch.Tensor, sources: slice, experts: slice) -> torch.Tensor:
        """Rows of (source, expert) that have gone when walks stand at `position`."""
        begins, counts = self._begins[sources, experts], self.counts[sources, experts]
        return torch.minimum((position[self._owners[experts]] - begins).clamp_(min=0), counts)

    def _position(self, number: int, leg: int = 0, num_legs: int = 1) -> torch.Tensor:
        return self._limits * number + torch.div(self._limits * leg, num_legs, rounding_mode="floor")

    def num_legs(self, number: int) -> int:
        """Exchanges of round `number`: as few as keep every source within `max_sent`."""
        most_received = int(self._limits.max())
        num_legs = 1
        if min(int(self.counts.sum(dim=1).max()), int(self._limits.sum())) <= self.max_sent:
            return num_legs
        while num_legs < most_received and self._largest_sent(number, num_legs) > self.max_sent:
            num_legs = min(2 * num_legs, most_received)
        return num_legs

    def _largest_sent(self, number: int, num_legs: int) -> int:
        everything = slice(None)
        gone = [
            self._gone(self._position(number, leg, num_legs), everything, everything).sum(dim=1)
            for leg in range(num_legs + 1)
        ]
        return int(torch.stack(gone).diff(dim=0).max())

    def legs(self, rank: int, number: int) -> list[Leg]:
        num_legs = self.num_legs(number)
        positions = [self._position(number, leg, num_legs) for leg in range(num_legs + 1)]
        own, everything = _slice(self.placement.owned(rank)), slice(None)
        sent = [self._gone(position, slice(rank, rank + 1), everything)[0] for position in positions]
        received = [self._gone(position, everything, own) for position in positions]
        return [
            _leg(self.placement, sent[leg], sent[leg + 1], received[leg + 1] - received[leg]) for leg in range(num_legs)
        ]

    def received_before(self, rank: int, number: int) -> torch.Tensor:
        own = _slice(self.placement.owned(rank))
        return self._gone(self._position(number), slice(None), own).sum(dim=0)


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

    def legs(self, rank: int, number: int) -> list[Leg]:
        before, after = self._bounds[number], self._bounds[number + 1]
        own = _slice(self.placement.owned(rank))
        return [_leg(self.placement, before[rank], after[rank], (after - before)[:, own])]

    def received_before(self, rank: int, number: int) -> torch.Tensor:
        return self._bounds[number][:, _slice(self.placement.owned(rank))].sum(dim=0)


def _slice(experts: range) -> slice:
    return slice(experts.start, experts.stop)


def _leg(placement: Placement, first: torch.Tensor, last: torch.Tensor, received: torch.Tensor) -> Leg:
    sent_splits: list[int] = placement.by_rank(last - first).tolist()
    received_splits: list[int] = received.sum(dim=1).tolist()
    return Leg(first, last, received, sent_splits, received_splits)
