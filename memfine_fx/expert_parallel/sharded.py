"""Run one region whose experts are sharded: the op pair calls this instead of the single process's chunk loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import mul
from typing import TypeVar

import torch

from memfine_fx.config import Axis
from memfine_fx.expert_parallel.all_to_all import Packing
from memfine_fx.expert_parallel.bandwidth import bandwidth_of, flops_of, links_of
from memfine_fx.expert_parallel.clones import Clones, can_clone
from memfine_fx.expert_parallel.exchange import (
    NUM_EXTRAS,
    Announcement,
    Exchange,
    Place,
    Table,
    announcing_failure,
    gather_rows,
    gather_table,
)
from memfine_fx.expert_parallel.groups import ExpertGroup
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.replication import Spread, spread_rows
from memfine_fx.expert_parallel.replication_costs import ReplicationCosts, choose_replication
from memfine_fx.expert_parallel.round_loop import RoundLoop, RoundLoopStats, SavedRounds
from memfine_fx.expert_parallel.schedule import Rounds, Schedule, TokenSlices
from memfine_fx.memory.closed_form import chunk_count
from memfine_fx.memory.region_bytes import AllToAllSizes
from memfine_fx.runtime.loads import RoundStats
from memfine_fx.runtime.loop import SavedRows
from memfine_fx.runtime.routing import Routed, SliceCounter
from memfine_fx.runtime.store import LiveRegion

__all__ = ["ShardedExperts"]

ItemT = TypeVar("ItemT")

_STEP_FLOPS = 3.5
"""FLOPs of a step per FLOP of its forward: backward takes twice as many, and recomputes some."""
_LEAST_SAVED = 64
"""Fewest rows that can be saved for which rounds are made as small as these."""
_LATENCY_S = 1e-4
"""Seconds of a message, with the work around it."""


@dataclass(frozen=True)
class _Way:
    """The route of one step's rows: a schedule of rounds or slices, and the replication of experts, None without."""

    schedule: Schedule
    spread: Spread | None = None


class _LatestWay:
    """A cache of the route of the latest counts: backward reuses that of forward, and so do repeated counts.

    A route is a function of the gathered table alone, which backward finds among what forward saved. The table also
    holds the clones of the step before, from each rank its own: a rank that has recompiled the layer knows of none, and
    so all ranks know that.
    """

    def __init__(self, placement: Placement, all_to_all: AllToAllSizes) -> None:
        self._placement, self._all_to_all = placement, all_to_all
        self._latest: tuple[torch.Tensor, _Way] | None = None

    def clones_on(self, rank: int, slots: int) -> tuple[int, ...]:
        """Return the experts in a rank's slots in the latest step, -1 for none."""
        spread = None if self._latest is None else self._latest[1].spread
        return (-1,) * slots if spread is None else tuple(spread.clones_on(rank))

    def of(self, table: Table, costs: ReplicationCosts | None) -> _Way:
        """Return the route for a gathered table; without `costs` no expert is replicated."""
        latest = self._latest
        if latest is not None and torch.equal(latest[0], table.rows):
            return latest[1]
        counts, placement, spread, limits = table.counts, self._placement, None, table.limits
        staged = [self._all_to_all.staged_rows(rows) for rows in limits]
        plan = None if costs is None else choose_replication(counts, placement, costs, table.slots, table.clones)
        if plan is not None and costs is not None and plan.clones:
            spread = spread_rows(counts, placement, plan, table.slots, costs.node_ranks)
            counts, placement = spread.counts, spread.placement
            limits = [self._all_to_all.replicated_rows(rows) for rows in limits]
        way = _Way(Rounds(counts, placement, limits, staged, table.rooms), spread)
        self._latest = (table.rows.clone(), way)
        return way


@dataclass(frozen=True)
class ShardedExperts:
    """The sharded experts of one region; implements `runtime.parallel.RowExchange`.

    Args:
        ranks: that share the experts.
        placement: of the experts on them.
        layer: its name, for messages.
        doing: description of its run in announcements, the same on each rank that runs the same.
        axis: along which it is cut; not read from a plan, which a rank may fail to make in the middle of a step.
        chunk_rows: the most rows of a chunk of the rows received in a round.
        flops_per_row: of the expert function's matmuls on one row, forward.
        num_trained: elements of one expert in weights that are trained: the size of a clone's gradient.
    """

    ranks: ExpertGroup
    placement: Placement
    layer: str
    doing: str
    axis: Axis
    chunk_rows: int
    flops_per_row: int
    num_trained: int

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.placement.num_ranks, NUM_EXTRAS + self.ranks.slots + self.placement.num_experts

    @property
    def bandwidth(self) -> float:
        return bandwidth_of(self.ranks)

    @property
    def all_to_all(self) -> AllToAllSizes:
        """Return the sizes of the all-to-all, whose buffers come on top of the chunk loop's."""
        is_cut = self.axis == "rows"
        return AllToAllSizes(
            self.ranks.num_ranks,
            2 if self.ranks.overlaps else 1,
            self.chunk_rows if is_cut else None,
            self.ranks.rows_per_round if is_cut else None,
        )

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self.ranks.group, self.ranks.device)

    @cached_property
    def _way(self) -> _LatestWay:
        return _LatestWay(self.placement, self.all_to_all)

    def room(self, hidden: torch.Tensor, weight: torch.Tensor | None, num_rows: int) -> list[torch.Tensor]:
        return _packing(hidden, weight).buffers(num_rows, hidden)

    def share_counts(
        self, region: LiveRegion, order: torch.Tensor, offsets: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        place = Place(self.layer, "counting")
        with announcing_failure(self._exchange, place):
            region.check_ids(order, offsets)
            plan = region.plan_for(num_tokens)
        room = 0 if plan.policy == "nothing" else num_tokens * region.top_k
        rows = plan.rows_at_once
        if self.axis == "rows" and _LEAST_SAVED <= room < rows:  # a larger round would not be saved
            rows = room
        clones = self._way.clones_on(self.ranks.rank, self.ranks.slots)
        own = Announcement(self.doing, rows=rows, room=room, clones=clones)
        return gather_table(self._exchange, offsets, own, place)

    def forward(self, region: LiveRegion, routed: Routed, saved: SavedRows | None) -> torch.Tensor:
        loop = self._loop(region, routed, saved)
        num_tokens = routed.num_tokens
        out = loop.forward(region.out_dtype, partial(region.lower, num_tokens))
        stats = loop.stats
        region.plan, region.num_tokens = region.plan_for(num_tokens), num_tokens
        region.num_chunks, region.largest_chunk = stats.num_chunks, stats.largest_chunk
        region.stages_gradients = stats.is_split
        table = Table(routed.offsets, self.ranks.slots)
        received: list[int] = self.placement.by_rank(table.counts.sum(dim=0)).tolist()
        spread = None if loop.clones is None else loop.clones.spread
        computed = received if spread is None else spread.placement.by_rank(spread.counts.sum(dim=0)).tolist()
        region.rounds = RoundStats(
            num_ranks=self.ranks.num_ranks,
            num_rounds=stats.num_rounds,
            num_saved=loop.saved.num_rounds,
            largest=stats.largest_round,
            received=computed[self.ranks.rank],
            busiest=max(computed),
            num_clones=0 if spread is None else spread.num_clones,
            busiest_alone=max(received),
        )
        region.num_steps += 1
        return out

    def backward(
        self,
        region: LiveRegion,
        grad: torch.Tensor,
        routed: Routed,
        wanted: tuple[bool, bool],
        wanted_params: Sequence[Sequence[bool]],
        saved: SavedRows | None,
    ) -> list[torch.Tensor]:
        loop = self._loop(region, routed, saved)
        own_wanted = self._own(region, wanted_params)
        lower = partial(region.lower, routed.num_tokens)
        grad_hidden, grad_weight, opened = loop.backward(grad, wanted, own_wanted, lower)
        gradients = [gradient for gradient in (grad_hidden, grad_weight) if gradient is not None]
        kinds = region.compiled_expert.param_kinds
        for kind, tensors, flags, param in zip(kinds, routed.params, wanted_params, opened, strict=True):
            own = [] if param is None else param.finish_all()
            if kind != "shared":
                self.ranks.average(own)
            gradients += self._among_all(tensors, flags, own) if kind == "each" else own
        return gradients

    def _loop(self, region: LiveRegion, routed: Routed, saved: SavedRows | None) -> RoundLoop:
        table = Table(routed.offsets, self.ranks.slots)
        rank, way = self.ranks.rank, self._way_of(region, routed, table)
        packing, own = _packing(routed.hidden, routed.flat_weight), self._own(region, routed.params)
        begins, clones = table.begins(rank), None
        if way.spread is not None:
            begins = way.spread.begins(begins, rank)
            kinds = region.compiled_expert.param_kinds
            clones = Clones(self._exchange, self.layer, rank, way.spread, self.placement, own, kinds)
        return RoundLoop(
            exchange=self._exchange,
            schedule=way.schedule,
            begins=begins,
            rank=rank,
            routed=replace(routed, params=own),
            compiled_expert=region.compiled_expert,
            rows=max(1, int(table.counts.sum())) if self.axis == "tokens" else min(table.limits[rank], self.chunk_rows),
            layer=self.layer,
            overlaps=self.ranks.overlaps,
            saved=SavedRounds.of(saved, way.schedule.num_saved, packing, routed.hidden),
            clones=clones,
            stats=RoundLoopStats(),
        )

    def _way_of(self, region: LiveRegion, routed: Routed, table: Table) -> _Way:
        if self.axis == "rows":
            return self._way.of(table, self._replication_costs(region, routed))
        place = Place(self.layer, "slicing")
        return _Way(agreed_slices(self._exchange, self.placement, table, routed, region.tuner.bins, place))

    def _replication_costs(self, region: LiveRegion, routed: Routed) -> ReplicationCosts | None:
        """Return the costs of replication in this layer, the same on every rank; None where there may be no clones."""
        compiled_expert = region.compiled_expert
        if not self.ranks.slots or not can_clone(compiled_expert.param_kinds):
            return None
        tables = [
            group[0] for kind, group in zip(compiled_expert.param_kinds, routed.params, strict=True) if kind == "expert"
        ]
        elements = [math.prod(table.shape[1:]) for table in tables]
        row = routed.hidden.shape[1] * routed.hidden.element_size()
        result = compiled_expert.out_width * compiled_expert.contribution_dtype.itemsize
        links = links_of(self.ranks)
        return ReplicationCosts(
            row_seconds=_STEP_FLOPS * self.flops_per_row / flops_of(self.ranks),
            there_bytes=2 * row + result,
            back_bytes=row + result,
            weight_bytes=2 * sum(map(mul, elements, (table.element_size() for table in tables))),
            gradient_bytes=4 * self.num_trained,
            near=links.near,
            far=links.far,
            latency=_LATENCY_S,
            node_ranks=links.node_ranks,
        )

    def _own(self, region: LiveRegion, groups: Sequence[Sequence[ItemT]]) -> list[Sequence[ItemT]]:
        """Return this rank's items of each parameter's group: of E tensors those of its experts."""
        owned = self.placement.owned(self.ranks.rank)
        return [
            group[owned.start : owned.stop] if kind == "each" else group
            for kind, group in zip(region.compiled_expert.param_kinds, groups, strict=True)
        ]

    def _among_all(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[bool], own: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the wanted gradients of E tensors; those of other ranks' experts are empty here."""
        owned, mine = self.placement.owned(self.ranks.rank), iter(own)
        return [
            next(mine) if expert in owned else torch.empty_like(tensor)
            for expert, (tensor, is_wanted) in enumerate(zip(tensors, wanted, strict=True))
            if is_wanted
        ]


def _packing(hidden: torch.Tensor, weight: torch.Tensor | None) -> Packing:
    """Return the column layout of rows and their routing weights."""
    return Packing.of([hidden, *([] if weight is None else [weight.reshape(-1)])])


def agreed_slices(
    exchange: Exchange, placement: Placement, table: Table, routed: Routed, bins: Sequence[int] | None, place: Place
) -> TokenSlices:
    """Return the paper's slices of every rank's tokens (MemFine, arXiv 2511.21431, section 3) in a step; a collective
    call.

    1. Each rank knows s'', the rows that it receives in this layer and step, and s'_max, its plan's rows. It asks for
       c = ceil(s'' / s'_max) slices, raised to the next of the bins if there are any.
    2. All take the largest c of any rank. The gathered table holds every rank's s'' and s'_max, so this all-reduce MAX
       needs no exchange of its own.
    3. Each rank cuts its tokens in c slices and tells how many rows of each expert a slice holds.

    A slice brings a rank s''/c rows if rows are spread evenly over the tokens. Where they are not it brings more, and
    nothing bounds it: this is here for comparison with `schedule.Rounds`.

    Args:
        exchange: of the layer.
        placement: of the experts.
        table: the gathered counts.
        routed: this rank's inputs.
        bins: allowed numbers, or None.
        place: for messages.
    """
    received: list[int] = placement.by_rank(table.counts.sum(dim=0)).tolist()
    num_slices = max(chunk_count(rows, limit, bins) for rows, limit in zip(received, table.limits, strict=True))
    rank = torch.distributed.get_rank(exchange.group)
    begins = table.begins(rank)
    ends = torch.cat([begins, begins[-1:] + table.counts[rank, -1:]])
    size = max(1, -(-routed.num_tokens // num_slices))
    counter = SliceCounter(routed.order, ends, routed.top_k, routed.num_tokens)
    bounds = counter.bounds(size) - begins
    missing = num_slices + 1 - len(bounds)
    own = torch.cat([bounds, bounds[-1:].expand(missing, -1)])
    everyone = gather_rows(exchange, own.reshape(-1), place)
    return TokenSlices(everyone.view(-1, *own.shape).transpose(0, 1).contiguous(), placement)
