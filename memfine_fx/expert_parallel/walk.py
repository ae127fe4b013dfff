"""One layer with experts on several ranks, walked round by round.

Each round
1. every source gathers the rows that leave it, leg by leg, with their routing weights (backward: with the gradients
   of their results), and they travel to the experts' owners, packed in one exchange;
2. the owner puts what came in expert order, as index arrays, and runs the chunk loop of the single process on it:
   a layer with K = 1 whose tokens are the rows that came;
3. results (backward: gradients of rows and weights) travel back the way they came and are added to their tokens.

With overlap the rows of round i+1 travel while round i computes, so that 2R rows are alive.
Rows of kept rounds are received into what is kept (`kept`); in backward only the gradients of their results travel.
Rows of other rounds travel again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from memfine_fx.expert_parallel.arrival import Arrival, Outgoing, wait_for
from memfine_fx.expert_parallel.exchange import Exchange, Place, Table, failing_at
from memfine_fx.expert_parallel.kept import KeptRounds
from memfine_fx.expert_parallel.packing import Packing
from memfine_fx.expert_parallel.schedule import Leg, Schedule
from memfine_fx.runtime.bodies import Bodies
from memfine_fx.runtime.gradients import ParamGradient
from memfine_fx.runtime.loop import Kept, accumulator_dtype, open_gradients, run_backward, run_forward
from memfine_fx.runtime.routed import Routed
from memfine_fx.runtime.schedule import Chunk, rows_schedule

__all__ = ["LayerWalk", "WalkStats"]

_Source = tuple[torch.Tensor, bool]
"""A tensor of which rows leave, and whether it has a row a token [T,w], or an entry an assignment [N]."""


@dataclass
class WalkStats:
    """What one walk did: rounds, rows of the largest, chunks, rows of the largest, whether an expert was split."""

    num_rounds: int = 0
    largest_round: int = 0
    num_chunks: int = 0
    largest_chunk: int = 0
    is_split: bool = False

    def add(self, chunks: Sequence[Chunk]) -> None:
        self.num_chunks += len(chunks)
        self.largest_round = max(self.largest_round, sum(chunk.num_rows for chunk in chunks))
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
        kept: room for rounds that are kept.
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
    kept: KeptRounds
    stats: WalkStats

    def forward(self, out_dtype: torch.dtype, on_failure: Callable[[int], None]) -> torch.Tensor:
        """[T,H_out]."""
        hidden, bodies = self.routed.hidden, self.bodies
        out = hidden.new_zeros((hidden.shape[0], bodies.out_width), dtype=accumulator_dtype(out_dtype))

        def run(arrival: Arrival) -> None:
            routed, chunks = self._arrived(arrival, arrival.take())
            own = self._values(arrival) if self.kept.holds(arrival.number) else None
            results = [run_forward(routed, bodies, chunks, bodies.contribution_dtype, on_failure, own)]
            del routed
            for outgoing, (back,) in self._return(arrival, results):
                out.index_add_(0, outgoing.tokens, back.to(out.dtype))

        def sources(number: int) -> list[_Source]:
            return self._rows_and_weights

        self._walk(run, "forward", sources)
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

        def run(arrival: Arrival) -> None:
            rows_grad, *columns = arrival.take()
            is_kept = self.kept.holds(arrival.number)
            if is_kept:
                columns = self.kept.rows(*self._range(arrival.number))
            routed, chunks = self._arrived(arrival, columns)
            own = self._values(arrival) if is_kept else None
            results = run_backward(
                rows_grad, routed, bodies, chunks, wanted, wanted_params, on_failure, own, into=gradients
            )
            del rows_grad, columns, routed
            if grad_weight is not None:
                results[-1] = results[-1].reshape(-1)
            for outgoing, back in self._return(arrival, results):
                if grad_hidden is not None:
                    grad_hidden.index_add_(0, outgoing.tokens, back.pop(0).to(grad_hidden.dtype))
                if grad_weight is not None:
                    grad_weight.index_copy_(0, outgoing.assignments, back.pop(0))

        def sources(number: int) -> list[_Source]:
            return [(grad, True), *(() if self.kept.holds(number) else self._rows_and_weights)]

        self._walk(run, "backward", sources)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.view(-1, self.routed.top_k),
            gradients,
        )

    @property
    def _rows_and_weights(self) -> list[_Source]:
        weight = self.routed.flat_weight
        return [(self.routed.hidden, True), *([] if weight is None else [(weight, False)])]

    def _walk(self, run: Callable[[Arrival], None], phase: str, sources: Callable[[int], list[_Source]]) -> None:
        """Run every round on what comes of its sources.

        What a round made dies with the call of `run`, before the next round's rows come.
        """
        self.stats.num_rounds = num_rounds = self.schedule.num_rounds
        start = partial(self._start, phase, sources)
        ahead: Arrival | None = None
        for number in range(num_rounds):
            arrival = start(number) if ahead is None else ahead
            arrival.wait()
            ahead = start(number + 1) if self.overlaps and number + 1 < num_rounds else None
            run(arrival)

    def _start(self, phase: str, sources: Callable[[int], list[_Source]], number: int) -> Arrival:
        """Send this rank's rows of a round and receive the others'; legs before the last are waited for."""
        legs = self.schedule.legs(self.rank, number)
        place = Place(self.layer, phase, number, self.schedule.num_rounds)
        tensors = sources(number)
        packing = Packing.of([tensor for tensor, _ in tensors])
        if phase == "forward" and self.kept.holds(number):
            inboxes = self.kept.inboxes(*self._range(number))
        else:
            inboxes = packing.buffers(sum(leg.num_received for leg in legs), tensors[0][0])
        arrival = Arrival(number, place, self.exchange, legs, packing, inboxes)
        del inboxes
        begin = 0
        for leg in legs:
            arrival.wait()
            outgoing = self._outgoing(leg)
            arrival.outgoing.append(outgoing)
            outboxes = packing.buffers(leg.num_sent, tensors[0][0])
            for view, (tensor, is_per_token) in zip(packing.views(outboxes), tensors, strict=True):
                places = outgoing.tokens if is_per_token else outgoing.assignments
                torch.index_select(tensor, 0, places, out=view)
            arrival.add(begin, leg, outboxes)
            begin += leg.num_received
        return arrival

    def _return(self, arrival: Arrival, results: list[torch.Tensor]) -> Iterator[tuple[Outgoing, list[torch.Tensor]]]:
        """Results of a round, [n,w] or [n], back to where their rows came from, leg by leg; `results` is emptied."""
        packing = Packing.of(results)
        packed = packing.packed(results) if results else []
        results.clear()
        begin = 0
        for leg, outgoing in zip(arrival.legs, arrival.outgoing, strict=True):
            backs = [one.new_empty((leg.num_sent, one.shape[1])) for one in packed]
            for back, own in zip(backs, packed, strict=True):
                with failing_at(arrival.place, self.exchange.group):
                    part = own[begin : begin + leg.num_received]
                    wait_for(self.exchange.swap(back, part, leg.sent_splits, leg.received_splits))
            begin += leg.num_received
            yield outgoing, packing.views(backs)

    def _outgoing(self, leg: Leg) -> Outgoing:
        """This rank's rows of a leg: expert after expert, which is rank after rank."""
        places = _ranges(self.table.begins(self.rank) + leg.first, leg.last - leg.first)
        order = self.routed.order
        assignments = order.index_select(0, places.to(order.device)).to(torch.int64)
        return Outgoing(assignments, torch.div(assignments, self.routed.top_k, rounding_mode="floor"))

    def _range(self, number: int) -> tuple[int, int]:
        """(first, number) of a round's rows among all that come to this rank."""
        before, after = (int(self.schedule.received_before(self.rank, one).sum()) for one in (number, number + 1))
        return before, after - before

    def _values(self, arrival: Arrival) -> Kept | None:
        return self.kept.values_of(*self._range(arrival.number))

    def _arrived(self, arrival: Arrival, columns: Sequence[torch.Tensor]) -> tuple[Routed, list[Chunk]]:
        """What came, rows and maybe weights, as a layer of its own in expert order, and its chunks."""
        received = torch.cat([leg.received for leg in arrival.legs])  # [legs*ep,E_local]
        lengths = received.flatten()
        begins = (lengths.cumsum(0) - lengths).view_as(received)
        order = _ranges(begins.t().flatten(), received.t().flatten())
        counts = received.sum(dim=0)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows, *weights = columns
        weight = weights[0].unsqueeze(1) if weights else None
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
