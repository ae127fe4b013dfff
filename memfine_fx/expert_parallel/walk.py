"""One layer with experts on several ranks, walked round by round.

Each round
1. every source gathers the rows that leave it, leg by leg, with their routing weights (backward: with the gradients
   of their results), and they travel to the experts' owners;
2. the owner puts what came in expert order, as index arrays, and runs the chunk loop of the single process on it:
   a layer with K = 1 whose tokens are the rows that came;
3. results (backward: gradients of rows and weights) travel back the way they came and are added to their tokens.

With overlap the rows of round i+1 travel while round i computes, so that 2R rows are alive.
Rows that came are not kept from forward to backward: they travel again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from memfine_fx.expert_parallel.exchange import Exchange, Place, Table, failing_at
from memfine_fx.expert_parallel.schedule import Leg, Schedule
from memfine_fx.runtime.bodies import Bodies
from memfine_fx.runtime.gradients import ParamGradient
from memfine_fx.runtime.loop import accumulator_dtype, open_gradients, run_backward, run_forward
from memfine_fx.runtime.routed import Routed
from memfine_fx.runtime.schedule import Chunk, rows_schedule

__all__ = ["LayerWalk", "WalkStats"]


@dataclass
class WalkStats:
    """What one walk did: rounds, chunks, rows of the largest chunk, whether an expert was split."""

    num_rounds: int = 0
    num_chunks: int = 0
    largest_chunk: int = 0
    is_split: bool = False

    def add(self, chunks: Sequence[Chunk]) -> None:
        self.num_chunks += len(chunks)
        self.largest_chunk = max([self.largest_chunk, *(chunk.num_rows for chunk in chunks)])
        self.is_split = self.is_split or any(chunk.is_part for chunk in chunks)


@dataclass(frozen=True)
class LayerWalk:
    """One layer in one step, on one rank.

    Args:
        exchange: its collectives.
        schedule: its rounds.
        table: the gathered counts.
        rank: of this process in the group.
        routed: its inputs, with this rank's parameters.
        bodies: the compiled expert.
        rows: R, the most rows of a chunk.
        layer: its name, for messages.
        overlaps: whether rows travel while the round before computes.
        stats: filled while walking.
    """

    exchange: Exchange
    schedule: Schedule
    table: Table
    rank: int
    routed: Routed
    bodies: Bodies
    rows: int
    layer: str
    overlaps: bool
    stats: WalkStats

    def forward(self, out_dtype: torch.dtype, on_failure: Callable[[int], None]) -> torch.Tensor:
        """[T,H_out]."""
        hidden, bodies = self.routed.hidden, self.bodies
        out = hidden.new_zeros((hidden.shape[0], bodies.out_width), dtype=accumulator_dtype(out_dtype))

        def run(arrival: _Arrival) -> None:
            routed, chunks = self._routed(arrival)
            results = run_forward(routed, bodies, chunks, bodies.contribution_dtype, on_failure)
            del routed
            arrival.drop()
            for outgoing, back in self._return(arrival, results):
                out.index_add_(0, outgoing.tokens, back.to(out.dtype))

        self._walk(run, "forward", [hidden], [self.routed.flat_weight])
        return out.to(out_dtype)

    def backward(
        self,
        grad: torch.Tensor,
        wanted: tuple[bool, bool],
        wanted_params: Sequence[Sequence[bool]],
        on_failure: Callable[[int], None],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, list[ParamGradient | None]]:
        """(hidden's gradient, weight's [T,K], the parameters' still open); None where it is not wanted."""
        hidden, weight, bodies = self.routed.hidden, self.routed.flat_weight, self.bodies
        body = bodies.backward((*wanted, *map(any, wanted_params)))
        gradients = open_gradients(body, self.routed.params, bodies, wanted_params)
        grad_hidden = grad_weight = None
        if body.rows_grad is not None:
            grad_hidden = hidden.new_zeros(hidden.shape, dtype=accumulator_dtype(hidden.dtype))
        if body.weight_grad is not None:
            assert weight is not None
            grad_weight = torch.zeros_like(weight)

        def run(arrival: _Arrival) -> None:
            routed, chunks = self._routed(arrival)
            results = run_backward(
                arrival.rows[1], routed, bodies, chunks, wanted, wanted_params, on_failure, into=gradients
            )
            del routed
            arrival.drop()
            if grad_hidden is not None:
                for outgoing, back in self._return(arrival, results.pop(0)):
                    grad_hidden.index_add_(0, outgoing.tokens, back.to(grad_hidden.dtype))
            if grad_weight is not None:
                for outgoing, back in self._return(arrival, results.pop(0).reshape(-1)):
                    grad_weight.index_copy_(0, outgoing.assignments, back)

        self._walk(run, "backward", [hidden, grad], [weight])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.view(-1, self.routed.top_k),
            gradients,
        )

    def _walk(
        self,
        run: Callable[[_Arrival], None],
        phase: str,
        per_token: Sequence[torch.Tensor],
        per_choice: Sequence[torch.Tensor | None],
    ) -> None:
        """Run every round on what comes: rows of `per_token` tensors, then entries of `per_choice` ones.

        What a round made dies with the call of `run`, before the next round's rows come.
        """
        self.stats.num_rounds = num_rounds = self.schedule.num_rounds
        choices = [tensor for tensor in per_choice if tensor is not None]
        start = partial(self._start, phase, per_token, choices)
        ahead: _Arrival | None = None
        for number in range(num_rounds):
            arrival = start(number) if ahead is None else ahead
            arrival.wait()
            ahead = start(number + 1) if self.overlaps and number + 1 < num_rounds else None
            run(arrival)

    def _start(
        self, phase: str, per_token: Sequence[torch.Tensor], per_choice: Sequence[torch.Tensor], number: int
    ) -> _Arrival:
        """Send this rank's rows of a round and receive the others'; legs before the last are waited for."""
        legs = self.schedule.legs(self.rank, number)
        place = Place(self.layer, phase, number, self.schedule.num_rounds)
        num_rows = sum(leg.num_received for leg in legs)
        sources = [*per_token, *per_choice]
        inboxes = [one.new_empty((num_rows, *one.shape[1:])) for one in sources]
        rows, entries = inboxes[: len(per_token)], inboxes[len(per_token) :]
        arrival = _Arrival(number, place, self.exchange.group, legs, rows, entries)
        begin = 0
        for leg in legs:
            arrival.wait()
            outgoing = self._outgoing(leg)
            arrival.outgoing.append(outgoing)
            for place_in, source in enumerate(sources):
                index = outgoing.tokens if place_in < len(per_token) else outgoing.assignments
                inbox = inboxes[place_in][begin : begin + leg.num_received]
                arrival.add(self.exchange, inbox, source.index_select(0, index), leg.received_splits, leg.sent_splits)
            begin += leg.num_received
        return arrival

    def _return(self, arrival: _Arrival, results: torch.Tensor) -> Iterator[tuple[_Outgoing, torch.Tensor]]:
        """Results of a round back to where their rows came from, leg by leg."""
        begin = 0
        for leg, outgoing in zip(arrival.legs, arrival.outgoing, strict=True):
            own = results[begin : begin + leg.num_received]
            begin += leg.num_received
            back = results.new_empty((leg.num_sent, *results.shape[1:]))
            with failing_at(arrival.place, self.exchange.group):
                _wait(self.exchange.swap(back, own, leg.sent_splits, leg.received_splits))
            yield outgoing, back

    def _outgoing(self, leg: Leg) -> _Outgoing:
        """This rank's rows of a leg: expert after expert, which is rank after rank."""
        places = _ranges(self.table.begins(self.rank) + leg.first, leg.last - leg.first)
        order = self.routed.order
        assignments = order.index_select(0, places.to(order.device)).to(torch.int64)
        return _Outgoing(assignments, torch.div(assignments, self.routed.top_k, rounding_mode="floor"))

    def _routed(self, arrival: _Arrival) -> tuple[Routed, list[Chunk]]:
        """What came as a layer of its own, in expert order, and its chunks."""
        received = torch.cat([leg.received for leg in arrival.legs])  # [legs*ep,E_local]
        lengths = received.flatten()
        begins = (lengths.cumsum(0) - lengths).view_as(received)
        order = _ranges(begins.t().flatten(), received.t().flatten())
        counts = received.sum(dim=0)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        weight = arrival.entries[0].unsqueeze(1) if arrival.entries else None
        rows = arrival.rows[0]
        routed = Routed(rows, weight, order.to(rows.device), offsets, self.routed.params, 1)
        chunks = self._chunks(arrival.number, counts, offsets)
        self.stats.add(chunks)
        return routed, chunks

    def _chunks(self, number: int, counts: torch.Tensor, offsets: torch.Tensor) -> list[Chunk]:
        """Chunks of a round; an expert whose rows come in several rounds is split over them."""
        chunks = rows_schedule(offsets.tolist(), self.rows, groups=self.bodies.takes_group)
        before = self.schedule.received_before(self.rank, number)
        totals = self.schedule.received_before(self.rank, self.schedule.num_rounds)
        is_split = (totals != counts).tolist()
        goes_on = (totals != before + counts).tolist()
        return [
            part
            for chunk in chunks
            for part in _apart(chunk, is_split)
            for part in [
                replace(
                    part,
                    is_part=part.is_part or is_split[part.first_expert],
                    completes=part.completes and not goes_on[part.first_expert],
                )
            ]
        ]


@dataclass(frozen=True)
class _Outgoing:
    """Rows that leave: their flat assignments t*K+k, and their tokens."""

    assignments: torch.Tensor
    tokens: torch.Tensor


class _Arrival:
    """Rows of a round that come, or have come."""

    def __init__(
        self,
        number: int,
        place: Place,
        group: dist.ProcessGroup,
        legs: list[Leg],
        rows: list[torch.Tensor],
        entries: list[torch.Tensor],
    ) -> None:
        self.number, self.place, self.legs = number, place, legs
        self.rows, self.entries = rows, entries
        self.outgoing: list[_Outgoing] = []
        self._group = group
        self._pending: list[tuple[dist.Work | None, torch.Tensor]] = []

    def add(
        self, exchange: Exchange, inbox: torch.Tensor, outbox: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        with failing_at(self.place, self._group):
            self._pending.append((exchange.swap(inbox, outbox, received, sent), outbox))

    def wait(self) -> None:
        """Until all that was sent has gone and all that is expected has come; frees what was staged."""
        with failing_at(self.place, self._group):
            for work, _ in self._pending:
                _wait(work)
        self._pending.clear()

    def drop(self) -> None:
        """Free the rows that came."""
        self.rows, self.entries = [], []


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _ranges(begins: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """begins[0], begins[0]+1, ..., of `lengths[0]` numbers, then the next range: int64 on the host."""
    skipped = begins - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(skipped, lengths) + torch.arange(int(lengths.sum()))


def _apart(chunk: Chunk, is_split: Sequence[bool]) -> list[Chunk]:
    """A chunk of several whole experts, cut where one of them has rows in other rounds."""
    experts = range(chunk.first_expert, chunk.last_expert + 1)
    if len(chunk.ends) == 1 or not any(is_split[expert] for expert in experts):
        return [chunk]
    bounds = itertools.pairwise([0, *chunk.ends])
    return [
        Chunk(chunk.start + begin, chunk.start + end, expert, (end - begin,), is_part=False, completes=True)
        for expert, (begin, end) in zip(experts, bounds, strict=True)
        if end > begin
    ]
