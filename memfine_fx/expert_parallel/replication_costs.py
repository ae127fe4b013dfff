"""Estimate what expert replication costs and saves, and choose the replication plan of a layer's step.

A layer's step takes as long as its slowest rank computes, and as the fullest link of a rank is busy. Rows that are
computed elsewhere travel anyway; replication adds the clones: an expert's weights to every clone in forward, and its
gradient, in fp32, back in backward. Both follow one tree, over nodes first and then inside of them, so that no rank
sends an expert to more than two others of a node and two other nodes, and gradients are added in the tree's order, the
same in every run.

`choose_replication` makes a plan for each of a few targets, from nearly even rows to those that there are, and takes
the one with the least seconds: no clones, where moving weights takes longer than the skew. The clones of the step
before stay, with the rows that there are now, while they are nearly as good: then no plan is made, which takes seconds
at a thousand ranks, and the same weights travel the same ways in every step.

Not counted: work that hides behind an exchange, or weights sent ahead of the layer. Both would favour replication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.replication import (
    Clone,
    ReplicationPlan,
    no_replication,
    plan_replication,
    refit_replication,
    split_rows,
)

__all__ = ["TARGETS", "ReplicationCosts", "Wire", "choose_replication", "flows_of"]

TARGETS = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Rows of the busiest rank over the mean that plans are made for."""
_LEAST_GAIN = 0.02
"""Share of a step's seconds that a plan must save; a smaller gain is less than the model's accuracy."""
_STAYS = 0.05
"""Share by which the busiest rank may exceed that of a new plan, and the step its seconds, for clones to stay."""
_PIECES = 16
"""Pieces in which weights pass through a tree: a rank passes one on while it receives the next."""
_FAN_OUT = 2


@dataclass(frozen=True)
class ReplicationCosts:
    """Rates of a layer and of the links between ranks.

    Args:
        row_seconds: seconds of a row's matmuls in a step, forward and backward.
        there_bytes, back_bytes: bytes that a row sends to its expert and back in a step.
        weight_bytes, gradient_bytes: of one expert, as it is sent and as its gradient returns.
        near, far: bytes a second of a rank in each direction, to ranks of its node and of others.
        latency: seconds of a message.
        node_ranks: ranks of a node.
    """

    row_seconds: float
    there_bytes: int
    back_bytes: int
    weight_bytes: int
    gradient_bytes: int
    near: float
    far: float
    latency: float
    node_ranks: int

    def seconds(self, counts: torch.Tensor, placement: Placement, plan: ReplicationPlan) -> float:
        """Return the estimated seconds of a layer's step under a plan."""
        rows = Wire.of_rows(
            flows_of(counts, placement, plan, self.node_ranks), self.there_bytes, self.back_bytes, self.node_ranks
        )
        wire = rows.with_others(self.clones_wire(placement, plan))
        return plan.busiest * self.row_seconds + wire.seconds(self.near, self.far) + self._fill_seconds(plan)

    def clones_wire(self, placement: Placement, plan: ReplicationPlan) -> Wire:
        """Return the bytes of experts that are sent, and of their gradients that return."""
        sent: list[tuple[int, int, int]] = []
        for expert, clones in plan.by_expert().items():
            for parent, child in tree_of(placement.owner(expert), clones, self.node_ranks):
                sent += [(parent, child, self.weight_bytes), (child, parent, self.gradient_bytes)]
        return Wire.of_messages(sent, placement.num_ranks, self.node_ranks)

    def _fill_seconds(self, plan: ReplicationPlan) -> float:
        """Return the seconds until the last clone of an expert has its first piece, and the same for the gradient."""
        most = max((len(clones) for clones in plan.by_expert().values()), default=0)
        nodes = -(-most // self.node_ranks)
        far_hops, near_hops = (nodes.bit_length() if most else 0), min(most, self.node_ranks).bit_length()
        num_bytes = (self.weight_bytes + self.gradient_bytes) / _PIECES
        latency = 2 * self.latency * (far_hops + near_hops)
        return latency + far_hops * num_bytes / self.far + near_hops * num_bytes / self.near


@dataclass(frozen=True)
class Wire:
    """The bytes that each rank exchanges, [2,2,ep]: inside of its node or between nodes; out or in."""

    num_bytes: torch.Tensor
    node_ranks: int

    @staticmethod
    def of_messages(sent: Sequence[tuple[int, int, int]], num_ranks: int, node_ranks: int) -> Wire:
        """Return the bytes of messages (sender, receiver, bytes)."""
        table = torch.tensor(sent, dtype=torch.int64).view(-1, 3)
        distance = (table[:, 0] // node_ranks != table[:, 1] // node_ranks).to(torch.int64)
        totals = torch.zeros(2, 2, num_ranks, dtype=torch.int64)
        for way in (0, 1):
            totals.index_put_((distance, torch.full_like(distance, way), table[:, way]), table[:, 2], accumulate=True)
        return Wire(totals, node_ranks)

    @staticmethod
    def of_rows(flows: torch.Tensor, there_bytes: int, back_bytes: int, node_ranks: int) -> Wire:
        """Return the bytes of rows [source,computing rank] that go and come back; rows that stay have none."""
        ranks = torch.arange(len(flows))
        is_near = (ranks // node_ranks).unsqueeze(1) == ranks // node_ranks
        moved = flows * (ranks.unsqueeze(1) != ranks)
        totals = []
        for some in (moved * is_near, moved * ~is_near):
            out, into = some.sum(dim=1), some.sum(dim=0)
            totals.append(torch.stack([out * there_bytes + into * back_bytes, into * there_bytes + out * back_bytes]))
        return Wire(torch.stack(totals), node_ranks)

    def with_others(self, other: Wire) -> Wire:
        return Wire(self.num_bytes + other.num_bytes, self.node_ranks)

    @property
    def most_sent(self) -> int:
        """Return the bytes sent by the rank that sends most."""
        return int(self.num_bytes[:, 0].sum(dim=0).max())

    def seconds(self, near: float, far: float) -> float:
        """Return the seconds until all is sent and received; links inside of nodes and between them work at once."""
        most_near, most_far = (float(most) for most in self.num_bytes.flatten(1).max(dim=1).values)
        return max(most_near / near, most_far / far)


def flows_of(counts: torch.Tensor, placement: Placement, plan: ReplicationPlan, node_ranks: int) -> torch.Tensor:
    """Return the rows by source and the rank that computes them, [ep,ep]."""
    flows = placement.by_rank(counts).clone()
    for expert, clones in plan.by_expert().items():
        owner = placement.owner(expert)
        split = split_rows(counts[:, expert], clones, owner, node_ranks)
        flows[:, owner] -= counts[:, expert]
        flows.index_add_(1, torch.tensor([owner, *(clone.rank for clone in clones)]), split.t().contiguous())
    return flows


def tree_of(owner: int, clones: Sequence[Clone], node_ranks: int) -> list[tuple[int, int]]:
    """Return (parent, child) edges by which an expert reaches its clones: a rank of each node, then the others."""
    by_node: dict[int, list[int]] = {owner // node_ranks: [owner]}
    for rank in sorted(clone.rank for clone in clones):
        by_node.setdefault(rank // node_ranks, []).append(rank)
    return [
        edge
        for ranks in ([members[0] for members in by_node.values()], *by_node.values())
        for edge in ((ranks[(place - 1) // _FAN_OUT], ranks[place]) for place in range(1, len(ranks)))
    ]


def choose_replication(
    counts: torch.Tensor,
    placement: Placement,
    costs: ReplicationCosts,
    slots: int,
    before: Sequence[tuple[int, int]] = (),
) -> ReplicationPlan:
    """Return the plan with the least seconds, or the previous step's while it is nearly as good; no clones if none pay.

    Args:
        counts: [ep,E] int64 on the host.
        placement: of the experts.
        costs: of the layer and its links.
        slots: S.
        before: (expert, rank) of the clones in the step before.
    """
    alone, targets = no_replication(counts, placement), _targets(counts, placement)
    most = costs.seconds(counts, placement, alone) * (1 - _LEAST_GAIN)
    old = refit_replication(counts, placement, before, target=targets[0])
    old_seconds = costs.seconds(counts, placement, old)
    pays = bool(old.clones) and old_seconds < most
    if pays and old.busiest <= (1 + _STAYS) * targets[0]:
        return old
    new, seconds = alone, most
    for target in targets if slots else ():
        if target >= alone.busiest or target * costs.row_seconds >= seconds:  # the busiest of a plan has its target
            break
        plan = plan_replication(counts, placement, slots=slots, target=target, node_ranks=costs.node_ranks)
        its_seconds = costs.seconds(counts, placement, plan)
        if its_seconds < seconds:
            new, seconds = plan, its_seconds
    is_near = old.busiest <= (1 + _STAYS) * new.busiest and old_seconds <= (1 + _STAYS) * seconds
    return old if pays and is_near else new


def _targets(counts: torch.Tensor, placement: Placement) -> list[int]:
    """Return the targets in rows, fewest first."""
    mean = int(counts.sum()) / placement.num_ranks
    return [int(factor * mean) + 1 for factor in TARGETS]
