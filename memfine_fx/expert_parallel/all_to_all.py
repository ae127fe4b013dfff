"""Send and receive the rows of one round by all-to-all, and send their results back.

Tensors that travel together are packed as columns of one buffer, so that a round is one exchange, not one per tensor: a
small exchange costs what waiting for the other ranks costs (routing weights are a thousandth of the rows' bytes and
took as long). Columns of one dtype share a buffer [n,W] and are views of it. Rows of a shared buffer are padded to
multiples of 16 bytes, so that every row can be read in wide loads.

The ranges of all rounds' rows are copied to an accelerator at once and asynchronously; on a CPU no copy is needed.
Index arrays are made from them by one all-to-all after the other, when their turn comes, so that none outlives its
all-to-all.

A round has several all-to-alls where a rank would stage too many rows at once. Two all-to-alls are in flight: one
is filled, or its results are added to their tokens, while another travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.exchange import Exchange, Place, failing_at
from memfine_fx.expert_parallel.schedule import AllToAll
from memfine_fx.memory.region_bytes import ALL_TO_ALLS_IN_FLIGHT, padded_bytes

__all__ = ["AllToAllBuffers", "IncomingRound", "Packing", "RowIndices", "returned", "wait_for"]


@dataclass(frozen=True)
class Packing:
    """The layout of columns in buffers: (width, dtype) in order, width 0 for a single entry per row."""

    columns: tuple[tuple[int, torch.dtype], ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Packing:
        """Return the layout of tensors [n,w] and [n]."""
        return Packing(tuple((tensor.shape[1] if tensor.ndim == 2 else 0, tensor.dtype) for tensor in tensors))

    def buffers(self, num_rows: int, like: torch.Tensor) -> list[torch.Tensor]:
        """Return one uninitialized buffer [n,W] per dtype, in the order in which dtypes first occur."""
        return [like.new_empty((num_rows, width), dtype=dtype) for dtype, width in self._widths().items()]

    def num_buffers(self, num_columns: int) -> int:
        """Return how many buffers hold the first `num_columns` columns: the first buffers."""
        return len({dtype for _, dtype in self.columns[:num_columns]})

    def _widths(self) -> dict[torch.dtype, int]:
        widths: dict[torch.dtype, list[int]] = {}
        for width, dtype in self.columns:
            widths.setdefault(dtype, []).append(max(1, width))
        return {
            dtype: own[0] if len(own) == 1 else padded_bytes(sum(own) * dtype.itemsize) // dtype.itemsize
            for dtype, own in widths.items()
        }

    def views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the columns, [n,w] and [n], as views of buffers as from `buffers`."""
        by_dtype = {buffer.dtype: buffer for buffer in buffers}
        filled = dict.fromkeys(by_dtype, 0)
        columns = []
        for width, dtype in self.columns:
            if dtype not in by_dtype:
                break
            begin, buffer = filled[dtype], by_dtype[dtype]
            filled[dtype] = begin + max(1, width)
            columns.append(buffer[:, begin : begin + width] if width else buffer[:, begin])
        return columns


@dataclass
class AllToAllBuffers:
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
    def exchanged(self) -> list[torch.Tensor]:
        return self.inboxes[: self.packing.num_buffers(len(self.sources))]

    def fill(self, num_rows: int, tokens: torch.Tensor, assignments: torch.Tensor) -> list[torch.Tensor]:
        """Return send buffers, one for each exchanged inbox, with the rows of these tokens and assignments."""
        like = self.sources[0][0]
        outboxes = self.packing.buffers(num_rows, like)[: len(self.exchanged)]
        views = self.packing.views(outboxes)[: len(self.sources)]
        for view, (tensor, is_per_token) in zip(views, self.sources, strict=True):
            torch.index_select(tensor, 0, tokens if is_per_token else assignments, out=view)
        return outboxes

    def take(self) -> list[torch.Tensor]:
        """Return the receive buffers and drop the object's references, so that only the caller keeps them alive."""
        inboxes, self.inboxes = self.inboxes, []
        return inboxes


@dataclass
class IncomingRound:
    """The rows of one round that this rank receives, in flight or received.

    Args:
        number: of the round.
        place: the layer, pass and round, for error messages.
        exchange: the collectives of the layer.
        all_to_alls: of the round.
        buffers: what is exchanged.
    """

    number: int
    place: Place
    exchange: Exchange
    all_to_alls: Sequence[AllToAll]
    buffers: list[AllToAllBuffers]
    _pending: deque[list[tuple[dist.Work | None, torch.Tensor]]] = field(default_factory=deque)

    def add(self, begin: int, a2a: AllToAll, outboxes: Sequence[Sequence[torch.Tensor]]) -> None:
        """Start an all-to-all, whose rows are received into the inboxes from row `begin` on."""
        works = []
        with failing_at(self.place, self.exchange.group):
            for buffers, boxes in zip(self.buffers, outboxes, strict=True):
                for inbox, outbox in zip(buffers.exchanged, boxes, strict=True):
                    part = inbox[begin : begin + a2a.num_received]
                    works.append((self.exchange.swap(part, outbox, a2a.received_splits, a2a.sent_splits), outbox))
        self._pending.append(works)

    def wait(self, num_left: int = 0) -> None:
        """Wait until at most `num_left` all-to-alls are in flight; free the send buffers of the others."""
        with failing_at(self.place, self.exchange.group):
            while len(self._pending) > num_left:
                for work, _ in self._pending.popleft():
                    wait_for(work)


def returned(
    incoming: IncomingRound, results: list[torch.Tensor], packing: Packing
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Send the results of a round back to the ranks that sent its rows; yield (index, columns) of each
    all-to-all.

    Args:
        incoming: the received rows.
        results: buffers as from `Packing.buffers`, in the order in which rows were received; the list is emptied.
        packing: the column layout of the results.
    """
    owned = list(results)
    results.clear()
    pending: deque[tuple[int, list[torch.Tensor], list[dist.Work | None]]] = deque()
    begin = 0

    def finish() -> tuple[int, list[torch.Tensor]]:
        number, backs, works = pending.popleft()
        with failing_at(incoming.place, incoming.exchange.group):
            for work in works:
                wait_for(work)
        return number, packing.views(backs)

    for number, a2a in enumerate(incoming.all_to_alls):
        if len(pending) == ALL_TO_ALLS_IN_FLIGHT:
            yield finish()
        backs = packing.buffers(a2a.num_sent, owned[0]) if owned else []
        with failing_at(incoming.place, incoming.exchange.group):
            works = [
                incoming.exchange.swap(
                    back, own[begin : begin + a2a.num_received], a2a.sent_splits, a2a.received_splits
                )
                for back, own in zip(backs, owned, strict=True)
            ]
        pending.append((number, backs, works))
        begin += a2a.num_received
    while pending:
        yield finish()


def wait_for(work: dist.Work | None) -> None:
    """Wait until an exchange is done."""
    if work is not None:
        work.wait()


class RowIndices:
    """The index arrays of a layer's rounds in one pass.

    Args:
        rounds: the all-to-alls of every round, as this rank sees them.
        begins: [P], positions at which this rank's rows of each place begin in its own expert order.
        device: of the rows.
    """

    def __init__(self, rounds: Sequence[Sequence[AllToAll]], begins: torch.Tensor, device: torch.device) -> None:
        self._rounds, self._begins, self._moved = rounds, begins, None
        if device.type != "cpu":
            self._moved = _moved([self._ranges_of(number) for number in range(len(rounds))], device)

    def sent(self, number: int, index: int) -> torch.Tensor:
        """Return positions in expert order of this rank's rows that leave in an all-to-all of a round: by expert, so by
        rank."""
        begins, lengths = self._ranges_in_order(number)[index]
        return _ranges(begins, lengths, self._rounds[number][index].num_sent)

    def order(self, number: int) -> torch.Tensor:
        """Return the positions of a round's received rows in their buffer, in expert order: int32."""
        begins, lengths = self._ranges_in_order(number)[-1]
        return _ranges(begins, lengths, sum(a2a.num_received for a2a in self._rounds[number])).to(torch.int32)

    def _ranges_in_order(self, number: int) -> _Ranges:
        return self._ranges_of(number) if self._moved is None else self._moved[number]

    def _ranges_of(self, number: int) -> _Ranges:
        all_to_alls = self._rounds[number]
        received = torch.cat([a2a.received for a2a in all_to_alls])  # [all_to_alls*ep,P_local]
        lengths = received.flatten()
        starts = (lengths.cumsum(0) - lengths).view_as(received)
        sent = [(self._begins + a2a.first, a2a.last - a2a.first) for a2a in all_to_alls]
        return [*sent, (starts.t().flatten(), received.t().flatten())]


_Ranges = list[tuple[torch.Tensor, torch.Tensor]]
"""Begins and lengths of ranges of rows: those sent in each all-to-all, and those received in all all-to-alls."""


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
