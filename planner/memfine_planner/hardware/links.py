"""Who reaches whom over what: a group of ranks on two levels, the NVLink domain and the network."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from memfine_planner.hardware.systems import System

__all__ = ["Group"]


@dataclass(frozen=True)
class Group:
    """`size` ranks, `stride` apart in the rank order."""

    size: int
    stride: int = 1

    def per_domain(self, sys: System) -> int:
        """Members in one NVLink domain."""
        return max(1, min(self.size, sys.nvlink_domain // self.stride))

    def domains(self, sys: System) -> int:
        return ceil(self.size / self.per_domain(sys))
