"""Count rows by place under a replication plan, where every rank has its own experts and S slots.

Terms
    place     an expert of a rank or one of its slots; ranks have equally many, first its experts (as many as the rank
              with most owns; the last ranks may have some without an expert), then the slots: P of them in all

1. Rows of (source, expert), which stand together in the source's expert order, are cut in ranges: the owner's first,
   then each clone's in the order of the plan. So a place's rows of a source are one range there, as an expert's are.
2. With these counts [ep,P] the schedule is that of experts: rounds, all-to-alls and saved rounds need not know of
   clones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.replication import ReplicationPlan, split_rows

__all__ = ["Spread", "spread_rows"]


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
