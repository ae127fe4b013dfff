"""Plan expert replication: which experts are computed on other ranks too, and which rows are sent there.

Bounded memory alone leaves every rank waiting for the busiest one. Replication removes the skew itself: an expert of a
rank that has too many rows is cloned on one that has few, which computes part of its rows.

Terms
    clone     an expert's weights on a rank that does not own it, for one layer and step
    slot      room for one clone; every rank has S
    target    rows that no rank is to compute more of
    excess    rows of a rank above the target; room: rows of it below
    node      ranks with fast links among each other: consecutive ones, `node_ranks` of them

1. The rank with the largest excess gives rows of the expert that has most of them, to the rank of its node whose room
   is the smallest that takes all that is to be given; if there is none, to such a rank of another node; if there is
   none, to the largest room there is, in its node if half of that is there. So each clone ends an excess or fills a
   rank, and there are fewer clones than ranks.
2. A rank without a free slot, or without room, takes no more. Rows that no rank takes stay with their owner.
3. An expert's rows are split among the ranks that compute it: first those that stand there already, then those of the
   same node, then the others in order of ranks.

Every step of it is integer arithmetic on the gathered counts [ep,E], in a fixed order: all ranks make the same plan
and nothing is agreed upon. `replication_costs` decides which target pays.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfine_fx.expert_parallel.placement import Placement

__all__ = [
    "Clone",
    "ReplicationPlan",
    "Spread",
    "no_replication",
    "plan_replication",
    "refit_replication",
    "split_rows",
    "spread_rows",
]


@dataclass(frozen=True)
class Clone:
    """A replica of an expert on `rank`, which computes `rows` of its rows in place of the owner."""

    expert: int
    rank: int
    rows: int


@dataclass(frozen=True)
class ReplicationPlan:
    """A replication plan: which rank computes how many rows, and of which experts.

    Args:
        clones: in the order in which they were decided.
        computed: [ep], rows that each rank computes.
    """

    clones: tuple[Clone, ...]
    computed: tuple[int, ...]

    @property
    def busiest(self) -> int:
        return max(self.computed)

    def slots_used(self) -> int:
        """Return the most clones that one rank has."""
        on_rank = [0] * len(self.computed)
        for clone in self.clones:
            on_rank[clone.rank] += 1
        return max(on_rank)

    def by_expert(self) -> dict[int, list[Clone]]:
        """Return the clones of each expert that has any."""
        clones_by_expert: dict[int, list[Clone]] = {}
        for clone in self.clones:
            clones_by_expert.setdefault(clone.expert, []).append(clone)
        return clones_by_expert


def no_replication(counts: torch.Tensor, placement: Placement) -> ReplicationPlan:
    """Return the plan without clones, in which owners compute all rows of their experts."""
    return ReplicationPlan((), tuple(placement.by_rank(counts.sum(dim=0)).tolist()))


def plan_replication(
    counts: torch.Tensor, placement: Placement, *, slots: int, target: int, node_ranks: int | None = None
) -> ReplicationPlan:
    """Return a plan with which as few ranks as possible compute more than `target` rows.

    With as many slots as there are experts no rank does, if the target is not below the mean.

    Args:
        counts: [ep,E] int64 on the host.
        placement: of the experts.
        slots: S; 0 for no replication.
        target: rows.
        node_ranks: ranks of a node; None for one node.
    """
    computed = list(no_replication(counts, placement).computed)
    rooms = _Rooms(computed, target, slots, node_ranks or placement.num_ranks)
    left = counts.sum(dim=0).tolist()
    excesses = [(target - rows, rank) for rank, rows in enumerate(computed) if rows > target]
    # By rank: its experts by the rows that are left with the rank, fullest first.
    experts = [[(-left[expert], expert) for expert in placement.owned(rank)] for rank in range(placement.num_ranks)]
    for heap in (excesses, *experts):
        heapq.heapify(heap)
    clones = []
    while excesses:
        below, rank = heapq.heappop(excesses)
        rows_below, expert = experts[rank][0]
        transfer = rooms.take(rank, min(-below, -rows_below))
        if transfer is None:
            continue
        helper, moved = transfer
        clones.append(Clone(expert, helper, moved))
        computed[rank] -= moved
        computed[helper] += moved
        heapq.heapreplace(experts[rank], (rows_below + moved, expert))
        if computed[rank] > target:
            heapq.heappush(excesses, (target - computed[rank], rank))
    return ReplicationPlan(tuple(clones), tuple(computed))


def refit_replication(
    counts: torch.Tensor, placement: Placement, clones: Sequence[tuple[int, int]], *, target: int
) -> ReplicationPlan:
    """Return a plan with no other clones than these, with as many rows of each as end an excess or fill a rank.

    A rank that has one clone left to give rows to, or to take some of, is settled first: what it moves there it can
    move nowhere else. Plans join ranks like trees, since each clone ends an excess or fills a rank, and in a tree no
    other order moves more rows.

    Args:
        counts: [ep,E] int64 on the host.
        placement: of the experts.
        clones: (expert, rank); those that get no rows are left out.
        target: rows.
    """
    computed, left = list(no_replication(counts, placement).computed), counts.sum(dim=0).tolist()
    ends = [(("gives", placement.owner(expert)), ("takes", rank)) for expert, rank in clones]
    unsettled: dict[tuple[str, int], dict[int, None]] = {}
    for number, pair in enumerate(ends):
        for end in pair:
            unsettled.setdefault(end, {})[number] = None
    rows = [0] * len(clones)
    waiting = deque(end for end, clones_of_it in unsettled.items() if len(clones_of_it) == 1)
    waiting.extend(unsettled)  # what a circle joins has no first
    while waiting:
        numbers = unsettled[waiting.popleft()]
        if not numbers:
            continue
        number = next(iter(numbers))
        (_, owner), (_, rank) = ends[number]
        expert = clones[number][0]
        moved = rows[number] = max(0, min(computed[owner] - target, target - computed[rank], left[expert]))
        computed[owner] -= moved
        computed[rank] += moved
        left[expert] -= moved
        for end in ends[number]:
            del unsettled[end][number]
            (waiting.appendleft if len(unsettled[end]) == 1 else waiting.append)(end)
    clones_with_rows = [Clone(*pair, moved) for pair, moved in zip(clones, rows, strict=True) if moved]
    return ReplicationPlan(tuple(clones_with_rows), tuple(computed))


def split_rows(counts: torch.Tensor, clones: Sequence[Clone], owner: int, node_ranks: int) -> torch.Tensor:
    """Return the rows of one expert that its owner and each clone compute, by source: [1+clones,ep].

    Args:
        counts: [ep], the expert's rows by source.
        clones: of the expert.
        owner: rank that owns the expert.
        node_ranks: ranks of a node.
    """
    wanted = torch.tensor([int(counts.sum()) - sum(clone.rows for clone in clones), *(clone.rows for clone in clones)])
    ranks = torch.tensor([owner, *(clone.rank for clone in clones)])
    left, split = counts.clone(), torch.zeros(len(ranks), len(counts), dtype=torch.int64)
    here = torch.minimum(wanted, left[ranks])
    split[torch.arange(len(ranks)), ranks] = here
    wanted, left = wanted - here, left.index_add(0, ranks, -here)
    sources, nodes = torch.arange(len(counts)) // node_ranks, ranks // node_ranks
    for node in sorted(set(nodes.tolist())) if node_ranks < len(counts) else ():
        matched = _matched(wanted * (nodes == node), left * (sources == node))
        split += matched
        wanted, left = wanted - matched.sum(dim=1), left - matched.sum(dim=0)
    return split + _matched(wanted, left)


def _matched(wanted: torch.Tensor, offered: torch.Tensor) -> torch.Tensor:
    """Return the overlaps of intervals of these lengths, both laid end to end on one line: [wanted,offered]."""
    wanted_ends, offered_ends = wanted.cumsum(0).unsqueeze(1), offered.cumsum(0)
    ends = torch.minimum(wanted_ends, offered_ends)
    begins = torch.maximum(wanted_ends - wanted.unsqueeze(1), offered_ends - offered)
    return (ends - begins).clamp(min=0)


class _Rooms:
    """The ranks that can take rows, by node and in each node ordered by room."""

    def __init__(self, computed: Sequence[int], target: int, slots: int, node_ranks: int) -> None:
        self._node_ranks = node_ranks
        self._free = [slots] * len(computed)
        nodes = range(-(-len(computed) // node_ranks))
        self._by_node: list[list[tuple[int, int]]] = [[] for _ in nodes]
        for rank, rows in enumerate(computed):
            self._put(rank, target - rows)

    def take(self, rank: int, rows: int) -> tuple[int, int] | None:
        """Assign rows of `rank` to a helper; return (helper, how many of `rows` it takes), None where no rank can."""
        own = rank // self._node_ranks
        chosen = self._smallest_of([own], rows) or self._smallest_of(range(len(self._by_node)), rows)
        if chosen is None:
            chosen = self._largest(own)
        if chosen is None:
            return None
        room, helper = chosen
        self._by_node[helper // self._node_ranks].remove(chosen)
        moved = min(room, rows)
        self._free[helper] -= 1
        self._put(helper, room - moved)
        return helper, moved

    def _put(self, rank: int, room: int) -> None:
        if room > 0 and self._free[rank] > 0:
            bisect.insort(self._by_node[rank // self._node_ranks], (room, rank))

    def _smallest_of(self, nodes: Sequence[int], rows: int) -> tuple[int, int] | None:
        """Return the smallest room that takes all of `rows`, as (room, rank); None where there is none."""
        places = [(own, bisect.bisect_left(own, (rows, -1))) for own in (self._by_node[node] for node in nodes)]
        return min((own[place] for own, place in places if place < len(own)), default=None)

    def _largest(self, node: int) -> tuple[int, int] | None:
        """Return the largest room, as (room, rank); that of `node` if at least half as large; None without any."""
        largest = max((own[-1] for own in self._by_node if own), default=None)
        near = self._by_node[node][-1:]
        return near[0] if largest and near and 2 * near[0][0] >= largest[0] else largest


@dataclass(frozen=True)
class Spread:
    """The assignment of rows to experts and slots of ranks under a replication plan.

    Args:
        counts: [ep,P], rows that each source has for each place.
        before: [ep,P], rows of the same (source, expert) that go to other places before.
        experts: [P], the expert whose rows a place has; -1 for none.
        placement: of the places on ranks.
        slots: S.
    """

    counts: torch.Tensor
    before: torch.Tensor
    experts: torch.Tensor
    placement: Placement
    slots: int

    @property
    def num_own(self) -> int:
        """Return the number of a rank's places that are not slots."""
        return self.placement.per_rank - self.slots

    @property
    def num_clones(self) -> int:
        """Return the number of slots in use on all ranks."""
        return int((self.experts.view(-1, self.placement.per_rank)[:, self.num_own :] >= 0).sum())

    def clones_on(self, rank: int) -> list[int]:
        """Return the experts in a rank's slots; -1 for none."""
        owned = self.placement.owned(rank)
        experts: list[int] = self.experts[owned.start + self.num_own : owned.stop].tolist()
        return experts

    def begins(self, expert_begins: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the positions at which a source's rows of each place begin in its expert order, [P].

        Args:
            expert_begins: [E], positions at which its rows of each expert begin.
            rank: of the source.
        """
        return expert_begins[self.experts.clamp(min=0)] + self.before[rank]


def spread_rows(
    counts: torch.Tensor, placement: Placement, plan: ReplicationPlan, slots: int, node_ranks: int
) -> Spread:
    """Return the rows of each place under a plan.

    Args:
        counts: [ep,E] int64 on the host.
        placement: of the experts.
        plan: with at most `slots` clones on a rank.
        slots: S.
        node_ranks: ranks of a node, as the plan was made for.
    """
    num_ranks, width = placement.num_ranks, placement.per_rank + slots
    places = Placement(num_ranks * width, num_ranks)
    numbers = torch.arange(placement.num_experts)
    own = placement.owners() * width + numbers % max(1, placement.per_rank)
    experts = torch.full((places.num_experts,), -1)
    experts[own] = numbers
    spread = counts.new_zeros(num_ranks, places.num_experts)
    spread[:, own] = counts
    before = torch.zeros_like(spread)
    used = [0] * num_ranks
    for expert, clones in plan.by_expert().items():
        split = split_rows(counts[:, expert], clones, placement.owner(expert), node_ranks)
        expert_places = [int(own[expert])]
        for clone in clones:
            expert_places.append(clone.rank * width + placement.per_rank + used[clone.rank])
            used[clone.rank] += 1
        experts[expert_places] = expert
        spread[:, expert_places] = split.t()
        before[:, expert_places] = (split.cumsum(0) - split).t()
    assert max(used) <= slots, "a plan has more clones on a rank than there are slots"
    return Spread(spread, before, experts, places, slots)
