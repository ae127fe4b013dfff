"""Replicate experts in one pass of a layer: receive other ranks' weights in replica slots, send gradients back.

A slot is one row of an expert weight [slots,...] that is laid out like the rank's own. The expert's owner fills it,
directly from its weight into the slot, in forward and again in backward, since the copies are not saved. Weights travel
while the first round's rows do and while a rank's own experts compute. Gradients of clones are summed in fp32 on the
rank that computes them. They return at the end of the pass, and the owner adds them one after the other in the order of
the plan, so that every run adds in the same order. Frozen parameters have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.all_to_all import wait_for
from memfine_fx.expert_parallel.exchange import Exchange, Place, failing_at
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.replication import Spread
from memfine_fx.runtime.gradients import ParamGradient
from memfine_fx.runtime.loop import accumulator_dtype

__all__ = ["Clones", "ReplicaSlots", "bytes_of_clones", "can_clone"]


@dataclass(frozen=True)
class _Move:
    """One clone: an expert of its owner in a slot of another rank."""

    owner: int
    expert: int
    rank: int
    slot: int


def can_clone(kinds: Sequence[str]) -> bool:
    """Return whether experts are slices of weights [E,...] and not separate tensors: only slices fit in slots."""
    return "expert" in kinds and "each" not in kinds


def bytes_of_clones(numbers: int, dtype: torch.dtype, slots: int, num_own: int, *, with_gradients: bool) -> int:
    """Return the bytes that a rank needs for clones of one expert weight: the slots, and gradients in at least fp32.

    With gradients the owner also holds one that returned; and in low precision the accumulators of its own experts,
    which stay open while others compute rows of them.

    Args:
        numbers: elements of one expert in the weight.
        dtype: of the weight.
        slots: S.
        num_own: experts of a rank.
        with_gradients: in a backward pass of a weight that is trained.
    """
    num_bytes = slots * numbers * dtype.itemsize
    if with_gradients:
        is_low = accumulator_dtype(dtype) != dtype
        num_bytes += max(4, dtype.itemsize) * numbers * (slots + 1 + (num_own if is_low else 0))
    return num_bytes


@dataclass
class ReplicaSlots:
    """The replica slots of a rank in one pass, whose weights may still be in flight.

    Args:
        tables: parameters of the slots, by parameter of the expert function.
        exchange, place: the collectives that fill them, and the place for error messages.
        pending: receives and sends that are not done.
    """

    tables: list[Sequence[torch.Tensor]]
    exchange: Exchange
    place: Place
    pending: list[dist.Work]

    def arrived(self) -> list[Sequence[torch.Tensor]]:
        """Wait until the slots are filled and return their parameters."""
        with failing_at(self.place, self.exchange.group):
            while self.pending:
                wait_for(self.pending.pop())
        return self.tables


@dataclass(frozen=True)
class Clones:
    """The clones of one layer in one pass, as one rank sees them.

    Args:
        exchange: the collectives of the layer.
        layer: its name, for error messages.
        rank: of this process in the group.
        spread: which rank computes which rows.
        placement: of the experts.
        params: this rank's own, by parameter of the expert function.
        kinds: of each parameter.
    """

    exchange: Exchange
    layer: str
    rank: int
    spread: Spread
    placement: Placement
    params: Sequence[Sequence[torch.Tensor]]
    kinds: Sequence[str]

    @cached_property
    def moves(self) -> list[_Move]:
        """Return the clones of all ranks, ordered by owner, expert and rank."""
        moves = [
            _Move(self.placement.owner(expert), expert, rank, slot)
            for rank in range(self.placement.num_ranks)
            for slot, expert in enumerate(self.spread.clones_on(rank))
            if expert >= 0
        ]
        return sorted(moves, key=lambda move: (move.expert, move.rank))

    @cached_property
    def own_cloned(self) -> set[int]:
        """Return this rank's experts of which other ranks compute rows too, by their index on this rank."""
        return {move.expert - self._first for move in self.moves if move.owner == self.rank}

    @property
    def _first(self) -> int:
        return self.placement.owned(self.rank).start

    @cached_property
    def num_used(self) -> int:
        """Return how many slots of this rank hold a clone: the first ones."""
        return sum(expert >= 0 for expert in self.spread.clones_on(self.rank))

    def fetch(self, phase: str) -> ReplicaSlots:
        """Start to fill this rank's slots and those of ranks that clone its experts; all those ranks must call it."""
        slots = [
            [_table_like(group[0], self.num_used)] if kind == "expert" else group
            for group, kind in zip(self.params, self.kinds, strict=True)
        ]
        tables = [
            (own[0], slot[0])
            for own, slot, kind in zip(self.params, slots, self.kinds, strict=True)
            if kind == "expert"
        ]
        sent, received = [], []
        for move in self.moves:
            if move.owner == self.rank:
                sent += [(_flat(own[move.expert - self._first]), move.rank) for own, _ in tables]
            if move.rank == self.rank:
                received += [(_flat(slot[move.slot]), move.owner) for _, slot in tables]
        return ReplicaSlots(slots, self.exchange, self._place(phase), self._begin(sent, received, phase))

    def open_gradients(
        self, slots: Sequence[Sequence[torch.Tensor]], own: Sequence[ParamGradient | None]
    ) -> list[ParamGradient | None]:
        """Return accumulators for the slots' gradients; a shared parameter has one for all rows of this rank.

        Args:
            slots: parameters of the slots, as from `fetch`.
            own: accumulators of this rank's experts.
        """
        return [
            param if kind == "shared" or param is None else ParamGradient(tensors, "expert", [True], in_fp32=True)
            for param, tensors, kind in zip(own, slots, self.kinds, strict=True)
        ]

    def give_back(self, slots: Sequence[ParamGradient | None], own: Sequence[ParamGradient | None]) -> None:
        """Send gradients of clones to their owners, which add them one expert after the other.

        An owner waits for each gradient before it receives the next; a sender goes on with the next clone.
        """
        sending: list[dist.Work] = []
        pairs = [
            (slot.finish_all()[0], param)
            for slot, param, kind in zip(slots, own, self.kinds, strict=True)
            if kind == "expert" and slot is not None and param is not None
        ]
        for move in self.moves:
            if move.rank == self.rank:
                sending += self._begin([(_flat(grad[move.slot]), move.owner) for grad, _ in pairs], [], "backward")
            if move.owner == self.rank:
                inboxes = [_like(grad) for grad, _ in pairs]
                self._wait(self._begin([], [(_flat(inbox), move.rank) for inbox in inboxes], "backward"))
                for inbox, (_, param) in zip(inboxes, pairs, strict=True):
                    param.add_tensor(move.expert - self._first, inbox, is_part=True)
        self._wait(sending)

    def _place(self, phase: str) -> Place:
        return Place(f"clones of experts of {self.layer}", phase)

    def _begin(
        self, sent: Sequence[tuple[torch.Tensor, int]], received: Sequence[tuple[torch.Tensor, int]], phase: str
    ) -> list[dist.Work]:
        with failing_at(self._place(phase), self.exchange.group):
            return self.exchange.pass_on(sent, received)

    def _wait(self, works: Sequence[dist.Work]) -> None:
        with failing_at(self._place("backward"), self.exchange.group):
            for work in works:
                wait_for(work)


def _like(table: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor for one expert of a weight."""
    return torch.empty_strided(table.shape[1:], table.stride()[1:], dtype=table.dtype, device=table.device)


def _table_like(own: torch.Tensor, slots: int) -> torch.Tensor:
    """Return an uninitialized weight of `slots` experts with this rank's layout, contiguous where that has gaps."""
    shape = (slots, *own.shape[1:])
    if not _has_no_gaps(own.shape[1:], own.stride()[1:]):
        return own.new_empty(shape)
    return torch.empty_strided(shape, own.stride(), dtype=own.dtype, device=own.device)


def _flat(expert: torch.Tensor) -> torch.Tensor:
    """Return an expert's elements as one dimension: a view in memory order, or a copy where it has gaps.

    The columns of an adapter's factor have gaps: an expert's are as far apart as its rank has experts.
    """
    if not _has_no_gaps(expert.shape, expert.stride()):
        return expert.contiguous().view(-1)
    return expert.as_strided((expert.numel(),), (1,))


def _has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor's elements fill its memory without gaps, in any order of dimensions."""
    filled = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True
