"""Assign experts to ranks: contiguous ranges, as `torch.distributed.tensor` shards a dimension.

Every rank but the last ones owns ceil(E / ep) experts; the last own what is left, maybe nothing. An even spread of the
remainder would balance better, but then a checkpoint could not be read as a DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """E experts on `num_ranks` ranks."""

    num_experts: int
    num_ranks: int

    @property
    def per_rank(self) -> int:
        """Return the most experts that a rank owns."""
        return -(-self.num_experts // self.num_ranks)

    def owned(self, rank: int) -> range:
        """Return the experts that a rank owns."""
        first = min(rank * self.per_rank, self.num_experts)
        return range(first, min(first + self.per_rank, self.num_experts))

    def owner(self, expert: int) -> int:
        return expert // self.per_rank

    def owners(self) -> torch.Tensor:
        """Return the owner of each expert, [E] int64."""
        return torch.arange(self.num_experts) // max(1, self.per_rank)

    def by_rank(self, per_expert: torch.Tensor) -> torch.Tensor:
        """Return sums over each rank's experts: [...,E] -> [...,num_ranks]."""
        shape = (*per_expert.shape[:-1], self.num_ranks)
        return per_expert.new_zeros(shape).index_add_(-1, self.owners(), per_expert)
