"""Send and receive the rows of one round by all-to-all, and send their results back.

A round has several legs (all-to-all chunks) where a rank would stage too many rows at once. Two legs are in flight: one
is filled, or its results are added to their tokens, while another travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.exchange import Exchange, Place, failing_at
from memfine_fx.expert_parallel.packing import Packing
from memfine_fx.expert_parallel.schedule import Leg
from memfine_fx.memory.region_bytes import LEGS_IN_FLIGHT

__all__ = ["Arrival", "Parcel", "returned", "wait_for"]


@dataclass
class Parcel:
    """A set of tensors whose rows travel together, as columns of the same all-to-all buffers.

    Args:
        sources: the tensors whose rows are sent, as the first columns: each with whether it has one row per token
            [T,w], or one entry per assignment [N].
        packing: the layout of all columns of the buffers.
        inboxes: the receive buffers, as from `Packing.buffers`; those without a sent column are not exchanged.
    """

    sources: Sequence[tuple[torch.Tensor, bool]]
    packing: Packing
    inboxes: list[torch.Tensor]

    @property
    def travelling(self) -> list[torch.Tensor]:
        return self.inboxes[: self.packing.num_buffers(len(self.sources))]

    def fill(self, num_rows: int, tokens: torch.Tensor, assignments: torch.Tensor) -> list[torch.Tensor]:
        """Return send buffers, one for each travelling inbox, with the rows of these tokens and assignments."""
        like = self.sources[0][0]
        outboxes = self.packing.buffers(num_rows, like)[: len(self.travelling)]
        views = self.packing.views(outboxes)[: len(self.sources)]
        for view, (tensor, is_per_token) in zip(views, self.sources, strict=True):
            torch.index_select(tensor, 0, tokens if is_per_token else assignments, out=view)
        return outboxes

    def take(self) -> list[torch.Tensor]:
        """Return the receive buffers and drop the parcel's references, so that only the caller keeps them alive."""
        inboxes, self.inboxes = self.inboxes, []
        return inboxes


@dataclass
class Arrival:
    """The rows of one round that this rank receives, in flight or received.

    Args:
        number: of the round.
        place: the layer, pass and round, for error messages.
        exchange: the collectives of the layer.
        legs: the all-to-all chunks of the round.
        parcels: the buffers that are exchanged.
    """

    number: int
    place: Place
    exchange: Exchange
    legs: Sequence[Leg]
    parcels: list[Parcel]
    _pending: deque[list[tuple[dist.Work | None, torch.Tensor]]] = field(default_factory=deque)

    def add(self, begin: int, leg: Leg, outboxes: Sequence[Sequence[torch.Tensor]]) -> None:
        """Start the all-to-all of a leg, whose rows are received into the inboxes from row `begin` on."""
        works = []
        with failing_at(self.place, self.exchange.group):
            for parcel, boxes in zip(self.parcels, outboxes, strict=True):
                for inbox, outbox in zip(parcel.travelling, boxes, strict=True):
                    part = inbox[begin : begin + leg.num_received]
                    works.append((self.exchange.swap(part, outbox, leg.received_splits, leg.sent_splits), outbox))
        self._pending.append(works)

    def wait(self, num_left: int = 0) -> None:
        """Wait until at most `num_left` legs are in flight; free the send buffers of the others."""
        with failing_at(self.place, self.exchange.group):
            while len(self._pending) > num_left:
                for work, _ in self._pending.popleft():
                    wait_for(work)


def returned(
    arrival: Arrival, results: list[torch.Tensor], packing: Packing
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Send the results of a round back to the ranks that sent its rows; yield (number of the leg, columns) by leg.

    Args:
        arrival: the received rows.
        results: buffers as from `Packing.buffers`, in the order in which rows were received; the list is emptied.
        packing: the column layout of the results.
    """
    owned = list(results)
    results.clear()
    pending: deque[tuple[int, list[torch.Tensor], list[dist.Work | None]]] = deque()
    begin = 0
    for number, leg in enumerate(arrival.legs):
        if len(pending) == LEGS_IN_FLIGHT:
            yield _finished(arrival, packing, pending)
        backs = packing.buffers(leg.num_sent, owned[0]) if owned else []
        with failing_at(arrival.place, arrival.exchange.group):
            works = [
                arrival.exchange.swap(back, own[begin : begin + leg.num_received], leg.sent_splits, leg.received_splits)
                for back, own in zip(backs, owned, strict=True)
            ]
        pending.append((number, backs, works))
        begin += leg.num_received
    while pending:
        yield _finished(arrival, packing, pending)


def _finished(
    arrival: Arrival,
    packing: Packing,
    pending: deque[tuple[int, list[torch.Tensor], list[dist.Work | None]]],
) -> tuple[int, list[torch.Tensor]]:
    number, backs, works = pending.popleft()
    with failing_at(arrival.place, arrival.exchange.group):
        for work in works:
            wait_for(work)
    return number, packing.views(backs)


def wait_for(work: dist.Work | None) -> None:
    """Wait until an exchange is done."""
    if work is not None:
        work.wait()
