"""Compute index arrays of a walk's sent and received rows, on the rows' device.

The ranges of all rounds are copied to an accelerator at once and asynchronously; on a CPU no copy is needed. Index
arrays are made from them leg by leg, when their turn comes, so that none outlives its leg.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfine_fx.expert_parallel.schedule import Leg

__all__ = ["WalkPlaces"]


class WalkPlaces:
    """The index arrays of one walk over a layer's rounds.

    Args:
        rounds: the legs of every round, as this rank sees them.
        begins: [P], positions at which this rank's rows of each place begin in its own expert order.
        device: of the rows.
    """

    def __init__(self, rounds: Sequence[Sequence[Leg]], begins: torch.Tensor, device: torch.device) -> None:
        self._rounds, self._begins, self._moved = rounds, begins, None
        if device.type != "cpu":
            self._moved = _moved([self._ranges_of(number) for number in range(len(rounds))], device)

    def sent(self, number: int, leg: int) -> torch.Tensor:
        """Return positions in expert order of this rank's rows that leave in a leg: by expert, so by rank."""
        begins, lengths = self._ranges_in_order(number)[leg]
        return _ranges(begins, lengths, self._rounds[number][leg].num_sent)

    def order(self, number: int) -> torch.Tensor:
        """Return the positions of a round's received rows in their buffer, in expert order: int32."""
        begins, lengths = self._ranges_in_order(number)[-1]
        return _ranges(begins, lengths, sum(leg.num_received for leg in self._rounds[number])).to(torch.int32)

    def _ranges_in_order(self, number: int) -> _Ranges:
        return self._ranges_of(number) if self._moved is None else self._moved[number]

    def _ranges_of(self, number: int) -> _Ranges:
        legs = self._rounds[number]
        received = torch.cat([leg.received for leg in legs])  # [legs*ep,P_local]
        lengths = received.flatten()
        starts = (lengths.cumsum(0) - lengths).view_as(received)
        sent = [(self._begins + leg.first, leg.last - leg.first) for leg in legs]
        return [*sent, (starts.t().flatten(), received.t().flatten())]


_Ranges = list[tuple[torch.Tensor, torch.Tensor]]
"""Begins and lengths of ranges of rows: those sent in each leg, and those received in all legs."""


def _moved(rounds: Sequence[_Ranges], device: torch.device) -> list[_Ranges]:
    """Return the ranges of all rounds on a device, moved in one copy."""
    parts = [part for ranges in rounds for pair in ranges for part in pair]
    if not parts:
        return [[] for _ in rounds]
    flat = torch.cat(parts)
    flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    moved = iter(torch.split(flat, [part.numel() for part in parts]))
    return [[(next(moved), next(moved)) for _ in ranges] for ranges in rounds]


def _ranges(begins: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Return begins[0], begins[0]+1, ..., `lengths[0]` numbers, then the next range: int64, `total` numbers."""
    skipped = begins - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(skipped, lengths, output_size=total).add_(torch.arange(total, device=begins.device))
