"""Rows of one round on their way: what leaves this rank, and what comes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.exchange import Exchange, Place, failing_at
from memfine_fx.expert_parallel.packing import Packing
from memfine_fx.expert_parallel.schedule import Leg

__all__ = ["Arrival", "Outgoing", "wait_for"]


@dataclass(frozen=True)
class Outgoing:
    """Rows that leave: their flat assignments t*K+k, and their tokens."""

    assignments: torch.Tensor
    tokens: torch.Tensor


class Arrival:
    """Rows of a round that come, or have come.

    Args:
        number: of the round.
        place: for messages.
        exchange: by which they come.
        legs: of the round.
        packing: of what comes.
        inboxes: where it comes to.
    """

    def __init__(
        self,
        number: int,
        place: Place,
        exchange: Exchange,
        legs: list[Leg],
        packing: Packing,
        inboxes: list[torch.Tensor],
    ) -> None:
        self.number, self.place, self.legs = number, place, legs
        self.outgoing: list[Outgoing] = []
        self._exchange, self._packing, self._inboxes = exchange, packing, inboxes
        self._pending: list[tuple[dist.Work | None, torch.Tensor]] = []

    def add(self, begin: int, leg: Leg, outboxes: list[torch.Tensor]) -> None:
        """Start a leg, whose rows come to `begin` and what follows."""
        with failing_at(self.place, self._exchange.group):
            for inbox, outbox in zip(self._inboxes, outboxes, strict=True):
                place = inbox[begin : begin + leg.num_received]
                work = self._exchange.swap(place, outbox, leg.received_splits, leg.sent_splits)
                self._pending.append((work, outbox))

    def wait(self) -> None:
        """Until all that was sent has gone and all that is expected has come; frees what was staged."""
        with failing_at(self.place, self._exchange.group):
            for work, _ in self._pending:
                wait_for(work)
        self._pending.clear()

    def take(self) -> list[torch.Tensor]:
        """What came, column by column; only who takes it holds it from now on."""
        views = self._packing.views(self._inboxes)
        self._inboxes = []
        return views


def wait_for(work: dist.Work | None) -> None:
    """Until an exchange is done."""
    if work is not None:
        work.wait()
