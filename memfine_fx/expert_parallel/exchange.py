"""Exchange counts, rows and results over torch.distributed, and name the place where a rank does not answer.

Everything that touches the network is here. A collective that fails or runs into the group's timeout becomes an
`ExchangeFailed` that names the layer, the pass and the round. With NCCL the group's watchdog may end the process first.

Ranks agree on what they run where they first meet, not when they compile. Compiling is no collective act: a rank may
recompile a graph alone (a batch of one, another mode, Dynamo's limit of recompilations), and a comparison that the
others do not join would hang as surely as what it is to prevent. The calls of a layer are collective, and whatever a
rank makes of a layer begins with the same small gather of equal size, an `Announcement`:
1. A raised layer announces itself with its counts, once a step, as it must anyway: agreement costs it nothing.
2. A parameter that is gathered whole (a refused region, code outside compiled graphs) is announced first.
3. A rank that cannot start announces that it stopped.
Where announcements differ every rank knows it from the same table, so that all enter a second gather, of the reasons in
words, and raise `RanksDisagree` with them. No rank has received anything else, and the group is as usable as before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from memfine_fx.errors import ExchangeFailed, RanksDisagree

__all__ = [
    "NUM_EXTRAS",
    "Announcement",
    "Exchange",
    "Place",
    "Table",
    "announce",
    "announcing_failure",
    "as_bytes",
    "gather_rows",
    "gather_table",
    "widen",
]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name until torch 2.12
NUM_EXTRAS = 4
"""Columns of the table before clones and counts: see `Announcement`, and where its first row is in expert order."""
_MOST_NAMED = 8
"""Ranks that a message names one by one."""
_STOPPED = "stopped"
_widths: dict[str, int] = {}


@dataclass(frozen=True)
class Place:
    """The layer, pass and round of an exchange, for error messages."""

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

    def pass_on(
        self, sent: Sequence[tuple[torch.Tensor, int]], received: Sequence[tuple[torch.Tensor, int]]
    ) -> list[dist.Work]:
        """Start sending contiguous tensors to single ranks and receiving others; for a pair of ranks in this order."""
        operations = []
        for start, pairs in ((dist.irecv, received), (dist.isend, sent)):
            numbers: dict[int, int] = {}
            for tensor, rank in pairs:
                numbers[rank] = numbers.get(rank, -1) + 1
                peer = dist.get_global_rank(self.group, rank)
                operations.append(dist.P2POp(start, as_bytes(tensor), peer, self.group, numbers[rank]))
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        return works


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats, which gloo does not support, as bytes in the same memory; other tensors unchanged."""
    is_small = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if is_small else tensor


@contextlib.contextmanager
def failing_at(place: Place, group: dist.ProcessGroup) -> Iterator[None]:
    """Raise network errors as `ExchangeFailed`, with the place."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, (ExchangeFailed, RanksDisagree, torch.OutOfMemoryError)):
            raise
        raise ExchangeFailed(str(place), dist.get_rank(group), dist.get_world_size(group), str(error)) from error


@dataclass(frozen=True)
class Announcement:
    """A rank's description of what it runs, sent to the others before anything else of a layer.

    Args:
        doing: what it runs, in words that are the same on every rank that runs the same.
        because: why, for the error of ranks that disagree; may differ between ranks.
        rows: R, the rows that it receives in a round.
        room: rows that it can save from forward to backward.
        clones: the experts that were in its slots in the layer's latest step, -1 for none: S of them.
    """

    doing: str
    because: str = ""
    rows: int = 0
    room: int = 0
    clones: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.doing}, because {self.because}" if self.because else self.doing


@functools.lru_cache(maxsize=4096)
def _fingerprint(text: str) -> int:
    """Return 63 bits of a hash of a text that must be the same on every rank."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def widen(exchange: Exchange, num_columns: int) -> None:
    """Widen every announcement of a group to hold S clones and E counts of its largest layer; a collective call.

    Otherwise ranks that are in layers of different sizes would meet in collectives of different sizes.
    """
    name = exchange.group.group_name
    own = torch.tensor([max(num_columns, _widths.get(name, 0))])
    _widths[name] = int(gather_rows(exchange, own, Place("the model", "sharding")).max())


def gather_table(exchange: Exchange, offsets: torch.Tensor, own: Announcement, place: Place) -> torch.Tensor:
    """Return every rank's (fingerprint, R, room, first row, clones, counts), [ep,4+S+E] int64 on the host.

    Args:
        offsets: [E+1] of this rank's rows in expert order.
        own: this rank's announcement.

    Raises:
        RanksDisagree: ranks run different things; every rank of the group raises it, with what each runs and why.
        ExchangeFailed: a rank did not answer.
    """
    header = torch.tensor([_fingerprint(own.doing), own.rows, own.room])
    columns = torch.cat([header, offsets[:1], torch.tensor(own.clones, dtype=torch.int64), offsets.diff()])
    spare = columns.new_zeros(max(0, NUM_EXTRAS + _widths.get(exchange.group.group_name, 0) - columns.numel()))
    table = gather_rows(exchange, torch.cat([columns, spare]), place)
    marks: Sequence[int] = table[:, 0].tolist()
    if any(mark != marks[0] for mark in marks):
        raise _disagreement(exchange, own, place)
    return table[:, : columns.numel()].contiguous()


def announce(exchange: Exchange, own: Announcement, place: Place) -> None:
    """Announce an exchange outside of rounds and check that all ranks run the same; a collective call.

    Raises:
        RanksDisagree, ExchangeFailed: as `gather_table`.
    """
    gather_table(exchange, torch.zeros(1, dtype=torch.int64), own, place)


@contextlib.contextmanager
def announcing_failure(exchange: Exchange, place: Place) -> Iterator[None]:
    """Announce to the waiting ranks that this rank stopped, where it fails before its own announcement."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(RanksDisagree, ExchangeFailed):  # this rank has an error of its own to raise
            announce(exchange, Announcement(_STOPPED, f"of {type(error).__name__}: {error}"), place)
        raise


def _disagreement(exchange: Exchange, own: Announcement, place: Place) -> RanksDisagree:
    """Return an error that says what every rank runs and why; a collective call, made by all for the same table."""
    everyone: list[Any] = [None] * dist.get_world_size(exchange.group)
    with failing_at(place, exchange.group):
        dist.all_gather_object(everyone, own, group=exchange.group)
    ranks_by_text: dict[str, list[int]] = {}
    for rank, other in enumerate(everyone):
        ranks_by_text.setdefault(str(other), []).append(rank)
    descriptions = "\n".join(f"  {_named(ranks)} {text}" for text, ranks in ranks_by_text.items())
    advice = "every rank must run the same layers in the same order, all of them chunked or none (memfine_fx.report)"
    if any(other.doing == _STOPPED for other in everyone):
        advice = "mend the error of the rank that stopped first"
    return RanksDisagree(f"ranks of the expert parallel group do not run the same: {advice}\n{descriptions}")


def _named(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}:"


def gather_rows(exchange: Exchange, own: torch.Tensor, place: Place) -> torch.Tensor:
    """Return every rank's int64 [n] as [ep,n]; both are on the host."""
    sent = own.to(exchange.device)
    rows = sent.new_empty((dist.get_world_size(exchange.group), sent.numel()))
    with failing_at(place, exchange.group):
        _all_gather(rows.view(-1), sent, group=exchange.group)
    return rows.to("cpu")


@dataclass(frozen=True)
class Table:
    """The announcements and counts of all ranks, as gathered by `gather_table`.

    Args:
        rows: the gathered tensor, [ep,4+S+E].
        slots: S.
    """

    rows: torch.Tensor
    slots: int = 0

    @property
    def limits(self) -> list[int]:
        """Return R of each rank."""
        limits: list[int] = self.rows[:, 1].tolist()
        return limits

    @property
    def rooms(self) -> list[int]:
        """Return the rows that each rank can save from forward to backward."""
        rooms: list[int] = self.rows[:, 2].tolist()
        return rooms

    @property
    def counts(self) -> torch.Tensor:
        """Return the rows that each source rank has for each expert, [ep,E]."""
        return self.rows[:, NUM_EXTRAS + self.slots :]

    @property
    def clones(self) -> list[tuple[int, int]]:
        """Return (expert, rank) of the clones in the latest step."""
        by_rank: list[list[int]] = self.rows[:, NUM_EXTRAS : NUM_EXTRAS + self.slots].tolist()
        return [(expert, rank) for rank, experts in enumerate(by_rank) for expert in experts if expert >= 0]

    def first(self, rank: int) -> int:
        """Return the position at which a rank's rows begin in its own expert order."""
        return int(self.rows[rank, 3])

    def begins(self, rank: int) -> torch.Tensor:
        """Return the positions at which a rank's rows of each expert begin in its own expert order, [E]."""
        counts = self.counts[rank]
        return counts.cumsum(0) - counts + self.first(rank)
