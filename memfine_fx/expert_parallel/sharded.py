"""One region whose experts are sharded: what the op pair calls in the place of the single process's loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import torch

from memfine_fx.config import Axis
from memfine_fx.expert_parallel.bandwidth import bandwidth_of
from memfine_fx.expert_parallel.exchange import (
    NUM_EXTRAS,
    Announcement,
    Exchange,
    Place,
    Table,
    gather_table,
    telling_failure,
)
from memfine_fx.expert_parallel.groups import ExpertGroup
from memfine_fx.expert_parallel.kept import KeptRounds
from memfine_fx.expert_parallel.packing import Packing
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.schedule import Rounds, Schedule
from memfine_fx.expert_parallel.slices import agreed_slices
from memfine_fx.expert_parallel.walk import LayerWalk, WalkStats
from memfine_fx.memory.region_bytes import Travel
from memfine_fx.runtime.loads import RoundStats
from memfine_fx.runtime.loop import Kept
from memfine_fx.runtime.routed import Routed
from memfine_fx.runtime.store import LiveRegion

__all__ = ["ShardedExperts"]

ItemT = TypeVar("ItemT")


class _LatestRounds:
    """The rounds of the latest counts: backward walks those of forward, and counts that repeat theirs."""

    def __init__(self, placement: Placement, travel: Travel) -> None:
        self._placement, self._travel = placement, travel
        self._latest: tuple[torch.Tensor, Rounds] | None = None

    def of(self, table: Table) -> Rounds:
        latest = self._latest
        if latest is not None and torch.equal(latest[0], table.rows):
            return latest[1]
        limits = table.limits
        rounds = Rounds(table.counts, self._placement, limits, [self._travel.leg_rows(rows) for rows in limits])
        self._latest = (table.rows.clone(), rounds)
        return rounds


@dataclass(frozen=True)
class ShardedExperts:
    """See `runtime.parallel.RowExchange`.

    Args:
        ranks: that share the experts.
        placement: of the experts on them.
        layer: its name, for messages.
        doing: what running it is called among the ranks, the same on each that runs the same.
        axis: along which it is cut; not read from a plan, which a rank may fail to make in the middle of a step.
        chunk_rows: the most rows of a chunk of what came in a round.
    """

    ranks: ExpertGroup
    placement: Placement
    layer: str
    doing: str
    axis: Axis
    chunk_rows: int

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.placement.num_ranks, NUM_EXTRAS + self.placement.num_experts

    @property
    def bandwidth(self) -> float:
        return bandwidth_of(self.ranks)

    @property
    def travel(self) -> Travel:
        """What it takes beyond the chunk loop."""
        is_cut = self.axis == "rows"
        return Travel(
            self.ranks.num_ranks,
            2 if self.ranks.overlaps else 1,
            self.chunk_rows if is_cut else None,
            self.ranks.rows_per_round if is_cut else None,
        )

    @cached_property
    def _exchange(self) -> Exchange:
        return Exchange(self.ranks.group, self.ranks.device)

    @cached_property
    def _rounds(self) -> _LatestRounds:
        return _LatestRounds(self.placement, self.travel)

    def room(self, hidden: torch.Tensor, weight: torch.Tensor | None, num_rows: int) -> list[torch.Tensor]:
        return _packing(hidden, weight).buffers(num_rows, hidden)

    def share_counts(
        self, region: LiveRegion, order: torch.Tensor, offsets: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        place = Place(self.layer, "counting")
        with telling_failure(self._exchange, place):
            region.check_ids(order, offsets)
            plan = region.plan_for(num_tokens)
        room = 0 if plan.keeps == "nothing" else num_tokens * region.top_k
        own = Announcement(self.doing, rows=plan.rows_at_once, room=room)
        return gather_table(self._exchange, offsets, own, place)

    def forward(self, region: LiveRegion, routed: Routed, kept: Kept | None) -> torch.Tensor:
        walk = self._walk(region, routed, kept)
        num_tokens = routed.num_tokens
        out = walk.forward(region.out_dtype, partial(region.lower, num_tokens))
        stats = walk.stats
        region.plan, region.num_tokens = region.plan_for(num_tokens), num_tokens
        region.num_chunks, region.largest_chunk = stats.num_chunks, stats.largest_chunk
        region.stages_gradients = stats.is_split
        received: list[int] = self.placement.by_rank(walk.table.counts.sum(dim=0)).tolist()
        region.rounds = RoundStats(
            num_ranks=self.ranks.num_ranks,
            num_rounds=stats.num_rounds,
            num_kept=walk.kept.num_rounds,
            largest=stats.largest_round,
            received=received[self.ranks.rank],
            busiest=max(received),
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
        kept: Kept | None,
    ) -> list[torch.Tensor]:
        walk = self._walk(region, routed, kept)
        own_wanted = self._own(region, wanted_params)
        lower = partial(region.lower, routed.num_tokens)
        grad_hidden, grad_weight, opened = walk.backward(grad, wanted, own_wanted, lower)
        gradients = [one for one in (grad_hidden, grad_weight) if one is not None]
        kinds = region.bodies.param_kinds
        for kind, tensors, flags, param in zip(kinds, routed.params, wanted_params, opened, strict=True):
            own = [] if param is None else param.finish_all()
            if kind != "shared":
                self.ranks.average(own)
            gradients += self._among_all(tensors, flags, own) if kind == "each" else own
        return gradients

    def _walk(self, region: LiveRegion, routed: Routed, kept: Kept | None) -> LayerWalk:
        table = Table(routed.offsets)
        rank, schedule = self.ranks.rank, self._schedule(region, routed, table)
        packing = _packing(routed.hidden, routed.flat_weight)
        return LayerWalk(
            exchange=self._exchange,
            schedule=schedule,
            table=table,
            rank=rank,
            routed=replace(routed, params=self._own(region, routed.params)),
            bodies=region.bodies,
            rows=max(1, int(table.counts.sum())) if self.axis == "tokens" else min(table.limits[rank], self.chunk_rows),
            layer=self.layer,
            overlaps=self.ranks.overlaps,
            kept=KeptRounds.of(kept, schedule.num_kept(table.rooms), packing, routed.hidden),
            stats=WalkStats(),
        )

    def _schedule(self, region: LiveRegion, routed: Routed, table: Table) -> Schedule:
        if self.axis == "rows":
            return self._rounds.of(table)
        place = Place(self.layer, "slicing")
        return agreed_slices(self._exchange, self.placement, table, routed, region.tuner.bins, place)

    def _own(self, region: LiveRegion, groups: Sequence[Sequence[ItemT]]) -> list[Sequence[ItemT]]:
        """This rank's part of what belongs to the parameters: of E tensors those of its experts."""
        owned = self.placement.owned(self.ranks.rank)
        return [
            group[owned.start : owned.stop] if kind == "each" else group
            for kind, group in zip(region.bodies.param_kinds, groups, strict=True)
        ]

    def _among_all(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[bool], own: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Gradients of E tensors, of which other ranks' are empty here."""
        owned, mine = self.placement.owned(self.ranks.rank), iter(own)
        return [
            next(mine) if expert in owned else torch.empty_like(tensor)
            for expert, (tensor, is_wanted) in enumerate(zip(tensors, wanted, strict=True))
            if is_wanted
        ]


def _packing(hidden: torch.Tensor, weight: torch.Tensor | None) -> Packing:
    """Of rows and their weights."""
    return Packing.of([hidden, *([] if weight is None else [weight.reshape(-1)])])
