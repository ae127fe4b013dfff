"""Run one layer with experts on several ranks, round by round.

Each round
1. every source gathers the rows that leave it, for one all-to-all after the other, with their routing weights
   (backward: also the gradients of their results), and they travel to the experts' owners; the next all-to-all is
   filled while one travels;
2. the owner sorts the received rows into expert order, as index arrays, and runs the chunk loop of the single process
   on them, in chunks of at most R rows: a layer with K = 1 whose tokens are the received rows. So results are set in
   place and not summed, and gradients of rows overwrite the received gradients of their results, which are read before;
3. results (backward: gradients of rows and weights) travel back the way they came and are added to their tokens, one
   all-to-all while the next travels.

With overlap the rows of round i+1 travel while round i computes, so that 2R rows are alive.
Rows of saved rounds are received into the saved tensors (`SavedRounds`); in backward only gradients of their results
travel. Rows of other rounds travel again. The first rounds are saved, as many as every rank has room for: a rank has
room for as many rows as it has routed rows of its own, which is what comes to it under even routing. So the bytes do
not follow the skew. Every rank knows every rank's room from the gathered table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from memfine_fx.expert_parallel.all_to_all import AllToAllBuffers, IncomingRound, Packing, RowIndices, returned
from memfine_fx.expert_parallel.clones import Clones, ReplicaSlots
from memfine_fx.expert_parallel.exchange import Exchange, Place
from memfine_fx.expert_parallel.schedule import AllToAll, Schedule
from memfine_fx.memory.region_bytes import ALL_TO_ALLS_IN_FLIGHT
from memfine_fx.runtime.compiled_expert import CompiledExpert, SavingFunctions
from memfine_fx.runtime.gradients import ParamGradient
from memfine_fx.runtime.loop import Places, SavedRows, accumulator_dtype, open_gradients, run_backward, run_forward
from memfine_fx.runtime.routing import Routed
from memfine_fx.runtime.schedule import Chunk, rows_schedule

__all__ = ["RoundLoop", "RoundLoopStats", "SavedRounds"]

_BuffersOf = Callable[[int, int], list[AllToAllBuffers]]
"""The buffers of a round, by its number and how many rows this rank receives in it."""


@dataclass
class RoundLoopStats:
    """Statistics of one pass: rounds, rows of the largest, chunks, rows of the largest, whether an expert was split."""

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
class RoundLoop:
    """One layer in one step, on one rank.

    Args:
        exchange: its collectives.
        schedule: its rounds.
        begins: [P], positions at which this rank's rows of each place begin in its expert order; places are experts,
            and slots if there are any.
        rank: of this process in the group.
        routed: its inputs, with this rank's parameters.
        compiled_expert: the compiled expert.
        rows: R, the most rows of a chunk of the rows received in a round.
        layer: its name, for messages.
        overlaps: whether rows of the next round travel while one computes.
        saved: tensors of the rounds that are saved.
        clones: of other ranks' experts, None without replication.
        stats: filled while the rounds run.
    """

    exchange: Exchange
    schedule: Schedule
    begins: torch.Tensor
    rank: int
    routed: Routed
    compiled_expert: CompiledExpert
    rows: int
    layer: str
    overlaps: bool
    saved: SavedRounds
    clones: Clones | None
    stats: RoundLoopStats

    def forward(self, out_dtype: torch.dtype, on_failure: Callable[[int], None]) -> torch.Tensor:
        """Return the layer's output, [T,H_out]."""
        hidden, compiled_expert = self.routed.hidden, self.compiled_expert
        out = hidden.new_zeros((hidden.shape[0], compiled_expert.out_width), dtype=accumulator_dtype(out_dtype))
        result_packing = Packing(((compiled_expert.out_width, compiled_expert.contribution_dtype),))
        slots = None if self.clones is None else self.clones.fetch("forward")

        def run(incoming: IncomingRound) -> None:
            (buffers,) = incoming.buffers
            routed = self._arrived(incoming, buffers.packing.views(buffers.take()))
            own = self._values(incoming) if self.saved.holds(incoming.number) else None
            results = result_packing.buffers(routed.num_tokens, hidden)
            for part, chunks in self._parts(incoming.number, routed, slots):
                run_forward(
                    part, compiled_expert, chunks, compiled_expert.contribution_dtype, on_failure, own, place=results[0]
                )
            del routed, part
            for index, columns in returned(incoming, results, result_packing):
                _add_rows(out, self._tokens(self._assignments(incoming.number, index)), columns.pop())

        def buffers_of(number: int, num_rows: int) -> list[AllToAllBuffers]:
            return [self._rows_and_weights(number, num_rows, is_saved=self.saved.holds(number))]

        self._run_rounds(run, "forward", buffers_of)
        return out.to(out_dtype)

    def backward(
        self,
        grad: torch.Tensor,
        wanted: tuple[bool, bool],
        wanted_params: Sequence[Sequence[bool]],
        on_failure: Callable[[int], None],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, list[ParamGradient | None]]:
        """Return (gradient of hidden, of weight [T,K], open accumulators of the parameters); None where not wanted."""
        hidden, weight, compiled_expert = self.routed.hidden, self.routed.flat_weight, self.compiled_expert
        backward = compiled_expert.backward((*wanted, *map(any, wanted_params)))
        gradients = open_gradients(backward, self.routed.params, compiled_expert, wanted_params)
        slots, slot_gradients = None, gradients
        if self.clones is not None:
            slots = self.clones.fetch("backward")
            slot_gradients = self.clones.open_gradients(slots.tables, gradients)
        grad_hidden = grad_weight = None
        if backward.rows_grad is not None:
            grad_hidden = hidden.new_zeros(hidden.shape, dtype=accumulator_dtype(hidden.dtype))
        if backward.weight_grad is not None:
            assert weight is not None
            grad_weight = torch.zeros_like(weight)
        result_packing = Packing.of(
            [*([] if grad_hidden is None else [hidden]), *([] if grad_weight is None or weight is None else [weight])]
        )
        are_alike = grad_hidden is not None and (grad.shape[1], grad.dtype) == (hidden.shape[1], hidden.dtype)
        grad_packing = result_packing if are_alike else Packing.of([grad])

        def run(incoming: IncomingRound) -> None:
            grad_buffers, *row_buffers = incoming.buffers
            boxes, is_saved = grad_buffers.take(), self.saved.holds(incoming.number)
            rows_grad = grad_packing.views(boxes)[0]
            if is_saved:
                columns = self.saved.rows(*self._range(incoming.number))
            else:
                columns = row_buffers[0].packing.views(row_buffers[0].take())
            routed = self._arrived(incoming, columns)
            results = boxes if are_alike else result_packing.buffers(routed.num_tokens, hidden)
            own = self._values(incoming) if is_saved else None
            places = Places(*_columns(result_packing, results, grad_hidden is not None, grad_weight is not None))
            parts = self._parts(incoming.number, routed, slots)
            for (part, chunks), into in zip(parts, (gradients, slot_gradients), strict=False):
                run_backward(
                    rows_grad,
                    part,
                    compiled_expert,
                    chunks,
                    wanted,
                    wanted_params,
                    on_failure,
                    own,
                    into=into,
                    places=places,
                )
            del rows_grad, columns, routed, places, boxes, parts, part
            for index, result_columns in returned(incoming, results, result_packing):
                assignments = self._assignments(incoming.number, index)
                if grad_weight is not None:
                    grad_weight.index_copy_(0, assignments, result_columns.pop())
                if grad_hidden is not None:
                    _add_rows(grad_hidden, self._tokens(assignments), result_columns.pop())

        def buffers_of(number: int, num_rows: int) -> list[AllToAllBuffers]:
            grads = AllToAllBuffers([(grad, True)], grad_packing, grad_packing.buffers(num_rows, grad))
            return [grads, *([] if self.saved.holds(number) else [self._rows_and_weights(number, num_rows)])]

        self._run_rounds(run, "backward", buffers_of)
        if self.clones is not None:
            self.clones.give_back(slot_gradients, gradients)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.view(-1, self.routed.top_k),
            gradients,
        )

    def _rows_and_weights(self, number: int, num_rows: int, *, is_saved: bool = False) -> AllToAllBuffers:
        """Return the buffers of a round's rows and weights; saved rounds are received into the saved tensors."""
        hidden, weight = self.routed.hidden, self.routed.flat_weight
        sources = [(hidden, True), *([] if weight is None else [(weight, False)])]
        packing = self.saved.packing
        inboxes = self.saved.inboxes(*self._range(number)) if is_saved else packing.buffers(num_rows, hidden)
        return AllToAllBuffers(sources, packing, inboxes)

    def _run_rounds(self, run: Callable[[IncomingRound], None], phase: str, buffers_of: _BuffersOf) -> None:
        """Call `run` on the received rows of every round.

        Tensors of a round are freed when `run` returns, before the next round's rows are received.
        """
        self.stats.num_rounds = num_rounds = self.schedule.num_rounds
        start = partial(self._start, phase, buffers_of)
        ahead: IncomingRound | None = None
        for number in range(num_rounds):
            incoming = start(number) if ahead is None else ahead
            incoming.wait()
            ahead = start(number + 1) if self.overlaps and number + 1 < num_rounds else None
            run(incoming)
            del incoming

    def _start(self, phase: str, buffers_of: _BuffersOf, number: int) -> IncomingRound:
        """Send this rank's rows of a round and receive the others'; the last are in flight when it returns."""
        all_to_alls = self._all_to_alls[number]
        place = Place(self.layer, phase, number, self.schedule.num_rounds)
        num_rows = sum(a2a.num_received for a2a in all_to_alls)
        incoming = IncomingRound(number, place, self.exchange, all_to_alls, buffers_of(number, num_rows))
        begin = 0
        for index, a2a in enumerate(all_to_alls):
            incoming.wait(ALL_TO_ALLS_IN_FLIGHT - 1)
            assignments = self._assignments(number, index)
            tokens = self._tokens(assignments)
            outboxes = [buffers.fill(a2a.num_sent, tokens, assignments) for buffers in incoming.buffers]
            incoming.add(begin, a2a, outboxes)
            begin += a2a.num_received
        return incoming

    @cached_property
    def _all_to_alls(self) -> list[list[AllToAll]]:
        return [self.schedule.all_to_alls(self.rank, number) for number in range(self.schedule.num_rounds)]

    @cached_property
    def _indices(self) -> RowIndices:
        return RowIndices(self._all_to_alls, self.begins, self.routed.order.device)

    def _assignments(self, number: int, index: int) -> torch.Tensor:
        """Return the flat assignments t*K+k of this rank's rows of an all-to-all."""
        return self.routed.order.index_select(0, self._indices.sent(number, index)).to(torch.int64)

    def _tokens(self, assignments: torch.Tensor) -> torch.Tensor:
        return torch.div(assignments, self.routed.top_k, rounding_mode="floor")

    def _range(self, number: int) -> tuple[int, int]:
        """Return (first, number) of a round's rows among all that this rank receives."""
        before, after = (
            int(self.schedule.received_before(self.rank, round_number).sum()) for round_number in (number, number + 1)
        )
        return before, after - before

    def _values(self, incoming: IncomingRound) -> SavedRows | None:
        return self.saved.values_of(*self._range(incoming.number))

    def _arrived(self, incoming: IncomingRound, columns: Sequence[torch.Tensor]) -> Routed:
        """Return the received rows, and weights if any, as a layer of its own in the order of places."""
        counts = sum(
            (a2a.received.sum(dim=0) for a2a in incoming.all_to_alls[1:]), incoming.all_to_alls[0].received.sum(dim=0)
        )
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows, *weights = columns
        weight = weights[0].unsqueeze(1) if weights else None
        return Routed(rows, weight, self._indices.order(incoming.number), offsets, self.routed.params, 1)

    def _parts(self, number: int, routed: Routed, slots: ReplicaSlots | None) -> Iterator[tuple[Routed, list[Chunk]]]:
        """Yield a round's rows with the parameters that compute them: those of this rank's experts, then of its slots.

        Clones may still be on their way while the first of the two is computed.
        """
        places = self._places_of_experts
        num_used = 0 if self.clones is None else self.clones.num_used
        own = self._chunks(number, routed.offsets, places)
        replicated = self._chunks(number, routed.offsets, range(places.stop, places.stop + num_used))
        self.stats.add([*own, *replicated])
        yield routed, own
        if slots is not None:
            yield replace(routed, params=slots.arrived()), replicated

    @property
    def _places_of_experts(self) -> range:
        """Return the places of this rank that are its own experts, not slots."""
        if self.clones is not None:
            return range(self.clones.spread.num_own)
        return range(self.schedule.received_before(self.rank, 0).numel())

    def _chunks(self, number: int, offsets: torch.Tensor, places: range) -> list[Chunk]:
        """Return the chunks of a round's rows of some places, numbered from the first of them.

        An expert whose rows come in several rounds, or of which others compute some, is split.
        """
        if not places:
            return []
        own = slice(places.start, places.stop)
        chunks = rows_schedule(
            offsets[places.start : places.stop + 1].tolist(), self.rows, groups=self.compiled_expert.takes_group
        )
        counts = offsets.diff()[own]
        before = self.schedule.received_before(self.rank, number)[own]
        totals = self.schedule.received_before(self.rank, self.schedule.num_rounds)[own]
        is_split, goes_on = (totals != counts).tolist(), (totals != before + counts).tolist()
        for expert in self.clones.own_cloned if self.clones is not None and not places.start else ():
            is_split[expert] = goes_on[expert] = True
        return [
            replace(
                part,
                is_part=part.is_part or is_split[part.first_expert],
                completes=part.completes and not goes_on[part.first_expert],
            )
            for chunk in chunks
            for part in _apart(chunk, is_split)
        ]


def _add_rows(total: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows to their tokens; rows that lie apart are brought together first, which is ten times faster on a CPU."""
    total.index_add_(0, tokens, rows.to(total.dtype).contiguous())


def _columns(
    packing: Packing, buffers: Sequence[torch.Tensor], has_rows: bool, has_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (rows, weights) as views of buffers; None for those that the buffers do not have."""
    views = iter(packing.views(buffers))
    return next(views) if has_rows else None, next(views) if has_weight else None


def _apart(chunk: Chunk, is_split: Sequence[bool]) -> list[Chunk]:
    """Return a chunk of several whole experts, cut into one per expert where any has rows in other rounds."""
    experts = range(chunk.first_expert, chunk.last_expert + 1)
    if len(chunk.ends) == 1 or not any(is_split[expert] for expert in experts):
        return [chunk]
    bounds = itertools.pairwise([0, *chunk.ends])
    return [
        Chunk(chunk.start + begin, chunk.start + end, expert, (end - begin,), is_part=False, completes=True)
        for expert, (begin, end) in zip(experts, bounds, strict=True)
        if end > begin
    ]


@dataclass(frozen=True)
class SavedRounds:
    """The saved tensors of the first rounds of one layer in one step.

    Args:
        num_rounds: how many rounds are saved.
        packing: column layout of the received rows and weights.
        arrived: [N,...] receive buffers of rows and weights, in the order in which they were received.
        functions: compiled functions that save tensors of their own, see `runtime.compiled_expert`; None if they do
            not.
        values: [N,...] the tensors that these save, in expert order within a round.
    """

    num_rounds: int
    packing: Packing
    arrived: Sequence[torch.Tensor]
    functions: SavingFunctions | None
    values: Sequence[torch.Tensor]

    @staticmethod
    def of(saved: SavedRows | None, num_rounds: int, packing: Packing, like: torch.Tensor) -> SavedRounds:
        """Return the saved rounds in the op's tensors: buffers of `packing`, then tensors of the expert functions.

        A rank that saves nothing takes part where it receives no row in the rounds that others save.
        """
        if saved is None:
            return SavedRounds(num_rounds, packing, packing.buffers(0, like), None, ())
        num_values = len(saved.functions.saved)
        num_buffers = len(saved.tensors) - num_values
        return SavedRounds(
            num_rounds, packing, saved.tensors[:num_buffers], saved.functions, saved.tensors[num_buffers:]
        )

    def holds(self, number: int) -> bool:
        return number < self.num_rounds

    def inboxes(self, begin: int, num_rows: int) -> list[torch.Tensor]:
        """Return the buffers that receive a round's rows and hold them until backward."""
        assert begin + num_rows <= self.arrived[0].shape[0], "a round is saved for which this rank has no room"
        return [buffer[begin : begin + num_rows] for buffer in self.arrived]

    def rows(self, begin: int, num_rows: int) -> list[torch.Tensor]:
        """Return the columns of a round's received rows."""
        return self.packing.views(self.inboxes(begin, num_rows))

    def values_of(self, begin: int, num_rows: int) -> SavedRows | None:
        """Return the tensors that the expert functions save of a round; None if they save none."""
        return (
            None
            if self.functions is None
            else SavedRows(self.functions, [value[begin : begin + num_rows] for value in self.values])
        )
