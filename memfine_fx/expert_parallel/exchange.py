"""Counts, rows and results over torch.distributed, and what is said when a rank does not answer.

Everything that touches the network is here. A collective that fails or runs into the group's timeout becomes an
`ExchangeFailed` that names the layer, the pass and the round. With NCCL the group's watchdog may end the process first.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from memfine_fx.errors import ExchangeFailed, RanksDisagree

__all__ = ["NUM_EXTRAS", "Announcement", "Exchange", "Place", "Table", "fingerprint", "gather_rows", "gather_table"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12
NUM_EXTRAS = 4
"""Columns of the table before the counts: see `Announcement`, and the place of its first row in expert order."""


@dataclass(frozen=True)
class Place:
    """Where in a step an exchange stands, for messages."""

    layer: str
    phase: str
    number: int | None = None
    num_rounds: int | None = None

    def __str__(self) -> str:
        where = f"the {self.phase} pass of {self.layer}"
        return where if self.number is None else f"round {self.number + 1} of {self.num_rounds} in {where}"


@dataclass(frozen=True)
class Exchange:
    """The collectives of one layer.

    Args:
        group: of the ranks that share the experts.
        device: where the group's tensors live.
    """

    group: dist.ProcessGroup
    device: torch.device

    def swap(self, inbox: torch.Tensor, outbox: torch.Tensor, received: list[int], sent: list[int]) -> dist.Work | None:
        """Start sending the rows of `outbox` [sum(sent),...] and receiving into `inbox` [sum(received),...]."""
        work: dist.Work | None = dist.all_to_all_single(inbox, outbox, received, sent, group=self.group, async_op=True)
        return work


@contextlib.contextmanager
def failing_at(place: Place, group: dist.ProcessGroup) -> Iterator[None]:
    """Errors of the network as ours, with the place."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, (ExchangeFailed, RanksDisagree, torch.OutOfMemoryError)):
            raise
        raise ExchangeFailed(str(place), dist.get_rank(group), dist.get_world_size(group), str(error)) from error


@dataclass(frozen=True)
class Announcement:
    """What a rank tells the others with its counts.

    Args:
        mark: fingerprint of what it runs.
        rows: R, that it takes in a round.
        room: rows that it can keep from forward to backward.
    """

    mark: int
    rows: int
    room: int


def fingerprint(*parts: object) -> int:
    """63 bits of a hash of what must be the same on every rank."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def gather_table(exchange: Exchange, offsets: torch.Tensor, own: Announcement, place: Place) -> torch.Tensor:
    """Every rank's (fingerprint, R, room, first row, counts), [ep,4+E] int64 on the host.

    Args:
        offsets: [E+1] of this rank's rows in expert order.
        own: what this rank tells.

    Raises:
        RanksDisagree: fingerprints differ; every rank of the group raises it.
        ExchangeFailed: a rank did not answer.
    """
    told = torch.tensor([own.mark, own.rows, own.room])
    table = gather_rows(exchange, torch.cat([told, offsets[:1], offsets.diff()]), place)
    marks: Sequence[int] = table[:, 0].tolist()
    others = [rank for rank, one in enumerate(marks) if one != marks[0]]
    if others:
        raise RanksDisagree(f"ranks {others} run something else than rank 0 in {place}")
    return table


def gather_rows(exchange: Exchange, own: torch.Tensor, place: Place) -> torch.Tensor:
    """Every rank's int64 [n] as [ep,n], from the host and to it."""
    sent = own.to(exchange.device)
    rows = sent.new_empty((dist.get_world_size(exchange.group), sent.numel()))
    with failing_at(place, exchange.group):
        _all_gather(rows.view(-1), sent, group=exchange.group)
    return rows.to("cpu")


@dataclass(frozen=True)
class Table:
    """What `gather_table` gathered, [ep,4+E]."""

    rows: torch.Tensor

    @property
    def limits(self) -> list[int]:
        """R of each rank."""
        limits: list[int] = self.rows[:, 1].tolist()
        return limits

    @property
    def rooms(self) -> list[int]:
        """Rows that each rank can keep."""
        rooms: list[int] = self.rows[:, 2].tolist()
        return rooms

    @property
    def counts(self) -> torch.Tensor:
        """[ep,E]."""
        return self.rows[:, NUM_EXTRAS:]

    def first(self, rank: int) -> int:
        """Where a rank's rows begin in its own expert order."""
        return int(self.rows[rank, 3])

    def begins(self, rank: int) -> torch.Tensor:
        """[E]: where a rank's rows of each expert begin in its own expert order."""
        counts = self.counts[rank]
        return counts.cumsum(0) - counts + self.first(rank)
