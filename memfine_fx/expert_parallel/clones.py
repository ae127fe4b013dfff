"""Clones of other ranks' experts in one walk: their weights come into slots, their gradients go back.

A slot is one row of a table that is made like the rank's own and filled by the expert's owner, straight from and into
the tables, in forward and again in backward, since weights are not kept. They travel while the first round's rows do
and while a rank's own experts compute. Gradients of clones are summed in fp32 where they are made. They return when the
walk has passed, and the owner adds them one after the other in the order of the plan, so that every run adds in the
same order. Frozen parameters have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.arrival import wait_for
from memfine_fx.expert_parallel.exchange import Exchange, Place, failing_at
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.spread import Spread
from memfine_fx.runtime.gradients import ParamGradient
from memfine_fx.runtime.loop import accumulator_dtype

__all__ = ["Clones", "Slots", "bytes_of_clones", "can_clone"]


@dataclass(frozen=True)
class _Move:
    """An expert of a rank's own in the slot of another rank."""

    owner: int
    expert: int
    rank: int
    slot: int


def can_clone(kinds: Sequence[str]) -> bool:
    """Whether experts stand in tables, of which a slot can be made everywhere."""
    return "expert" in kinds and "each" not in kinds


def bytes_of_clones(numbers: int, dtype: torch.dtype, slots: int, num_own: int, *, with_gradients: bool) -> int:
    """What help takes of a rank for one table: weights in the slots, and their gradients in fp32 at least.

    With gradients the owner also holds one that returned; and in low precision the sums of its own experts, which are
    open while others compute rows of them.

    Args:
        numbers: of one expert in the table.
        dtype: of the table.
        slots: S.
        num_own: experts of a rank.
        with_gradients: in a backward pass of a table that is trained.
    """
    num_bytes = slots * numbers * dtype.itemsize
    if with_gradients:
        is_low = accumulator_dtype(dtype) != dtype
        num_bytes += max(4, dtype.itemsize) * numbers * (slots + 1 + (num_own if is_low else 0))
    return num_bytes


@dataclass
class Slots:
    """What is to stand in a rank's slots in one walk.

    Args:
        tables: parameters of the slots, by parameter of the expert function.
        exchange, place: by which they come, for messages.
        pending: what has not come, or has not been sent.
    """

    tables: list[Sequence[torch.Tensor]]
    exchange: Exchange
    place: Place
    pending: list[dist.Work]

    def arrived(self) -> list[Sequence[torch.Tensor]]:
        """The tables, filled."""
        with failing_at(self.place, self.exchange.group):
            while self.pending:
                wait_for(self.pending.pop())
        return self.tables


@dataclass(frozen=True)
class Clones:
    """The clones of one layer in one walk, as one rank sees them.

    Args:
        exchange: by which they travel.
        layer: its name, for messages.
        rank: of this process in the group.
        spread: who computes what.
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
        """Of all ranks, in the order of owners, experts and ranks."""
        found = [
            _Move(self.placement.owner(expert), expert, rank, slot)
            for rank in range(self.placement.num_ranks)
            for slot, expert in enumerate(self.spread.clones_on(rank))
            if expert >= 0
        ]
        return sorted(found, key=lambda move: (move.expert, move.rank))

    @cached_property
    def own_cloned(self) -> set[int]:
        """This rank's experts, by their number among them, of which others compute rows too."""
        return {move.expert - self._first for move in self.moves if move.owner == self.rank}

    @property
    def _first(self) -> int:
        return self.placement.owned(self.rank).start

    @cached_property
    def num_used(self) -> int:
        """Slots of this rank that hold a clone: the first ones."""
        return sum(expert >= 0 for expert in self.spread.clones_on(self.rank))

    def fetch(self, phase: str) -> Slots:
        """Begin to fill this rank's slots and those of the ranks that clone its experts; a call of all those ranks."""
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
        return Slots(slots, self.exchange, self._place(phase), self._begin(sent, received, phase))

    def open_gradients(
        self, slots: Sequence[Sequence[torch.Tensor]], own: Sequence[ParamGradient | None]
    ) -> list[ParamGradient | None]:
        """Room for the slots' gradients; what all share has one gradient for all rows of this rank.

        Args:
            slots: as from `fetch`.
            own: of this rank's experts.
        """
        return [
            param if kind == "shared" or param is None else ParamGradient(tensors, "expert", [True], in_fp32=True)
            for param, tensors, kind in zip(own, slots, self.kinds, strict=True)
        ]

    def give_back(self, slots: Sequence[ParamGradient | None], own: Sequence[ParamGradient | None]) -> None:
        """Gradients of clones to their owners, and added there; one expert after the other.

        An owner waits for each gradient before it takes the next; who sends goes on with the next move.
        """
        sending: list[dist.Work] = []
        pairs = [
            (slot.finish_all()[0], param)
            for slot, param, kind in zip(slots, own, self.kinds, strict=True)
            if kind == "expert" and slot is not None and param is not None
        ]
        for move in self.moves:
            if move.rank == self.rank:
                sending += self._begin([(_flat(one[move.slot]), move.owner) for one, _ in pairs], [], "backward")
            if move.owner == self.rank:
                inboxes = [_like(one) for one, _ in pairs]
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
    """Room for one expert of a table."""
    return torch.empty_strided(table.shape[1:], table.stride()[1:], dtype=table.dtype, device=table.device)


def _table_like(own: torch.Tensor, slots: int) -> torch.Tensor:
    """Room for `slots` experts, each laid out as this rank's; in rows where those have gaps between their numbers."""
    shape = (slots, *own.shape[1:])
    if not _has_no_gaps(own.shape[1:], own.stride()[1:]):
        return own.new_empty(shape)
    return torch.empty_strided(shape, own.stride(), dtype=own.dtype, device=own.device)


def _flat(expert: torch.Tensor) -> torch.Tensor:
    """An expert's numbers, one behind the other: as they lie in memory, or a copy where there are gaps between them.

    The columns of an adapter's factor are such: an expert's stand as far apart as its rank has experts.
    """
    if not _has_no_gaps(expert.shape, expert.stride()):
        return expert.contiguous().view(-1)
    return expert.as_strided((expert.numel(),), (1,))


def _has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's numbers fill its memory, in whatever order of dimensions."""
    filled = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True
