"""Seconds that the parts of a step take: matmul FLOPs, bytes moved, launches, at the rates of a device.

Rates are measured (`rates`); this file only multiplies. Seconds rank plans that fit; they are not a promise of
the step's time, which also depends on what the compiler fuses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CALLS_PER_CHUNK", "STEP_FLOPS", "DeviceRates", "Work", "rows_seconds"]


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one device in one dtype.

    Args:
        matmul_flops: (rows, FLOPs a second of a product with so many rows), rows rising.
        copy_bytes: bytes a second, read and written ones both counted.
        launch_seconds: of calling one small operation.
        save_bytes: bytes a second that are written to memory which was just asked for, read once and given back. On a
            CPU the system hands out its pages as they are written; an accelerator's allocator has it already.
    """

    matmul_flops: tuple[tuple[int, float], ...]
    copy_bytes: float
    launch_seconds: float
    save_bytes: float = math.inf

    def flops_at(self, rows: float) -> float:
        """FLOPs a second of a product with `rows` rows, between the measured ones by straight lines."""
        (fewest, lowest), *_ = self.matmul_flops
        if rows <= fewest:
            return lowest * max(rows, 1) / fewest
        for (below, slower), (above, faster) in zip(self.matmul_flops, self.matmul_flops[1:], strict=False):
            if rows <= above:
                return slower + (faster - slower) * (rows - below) / (above - below)
        return self.matmul_flops[-1][1]

    @property
    def peak_flops(self) -> float:
        return max(rate for _, rate in self.matmul_flops)

    def saving_seconds(self, num_bytes: float, copied_bytes: float) -> float:
        """Return the seconds that saving costs: saved rows go to new memory, where a chunk would reuse that of the one
        before.

        Args:
            num_bytes: saved.
            copied_bytes: of these, computed elsewhere, read and written once more.
        """
        return num_bytes / self.save_bytes + 2 * copied_bytes / self.copy_bytes


@dataclass(frozen=True)
class Work:
    """FLOPs of matmuls, bytes moved by all else, calls."""

    flops: float = 0.0
    num_bytes: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes, self.launches + other.launches)

    def seconds(self, rates: DeviceRates, rows: float | None = None) -> float:
        """Return the seconds of this work, with `rows` rows in each product; at the peak rate where it is None."""
        flops = rates.peak_flops if rows is None else rates.flops_at(rows)
        return self.flops / flops + self.num_bytes / rates.copy_bytes + self.launches * rates.launch_seconds


STEP_FLOPS = 3.5
"""FLOPs of a region's step for each of its forward: backward takes twice as many, and recomputes some."""
CALLS_PER_CHUNK = 24
"""Operations that one chunk launches in forward and backward: gathers, compiled functions, weight gradients, additions.
"""


def rows_seconds(
    rates: DeviceRates,
    *,
    num_routed: int,
    num_experts: int,
    flops_per_row: float,
    param_bytes: int,
    rows: int,
    takes_group: bool,
) -> float:
    """Seconds of a layer's experts in one step with at most `rows` rows a chunk, rows spread evenly.

    Args:
        num_routed: N.
        flops_per_row: of forward and backward, recomputation included.
        param_bytes: of all experts; each further chunk of an expert adds to its gradient, read and written.
        takes_group: whether a chunk may hold several experts.
    """
    per_expert = max(1.0, num_routed / num_experts)
    num_chunks = -(-num_routed // rows) if takes_group else num_experts * -(-per_expert // rows)
    added = max(0.0, num_chunks - num_experts) * 2 * param_bytes / num_experts
    work = Work(flops_per_row * num_routed, added, num_chunks * CALLS_PER_CHUNK)
    return work.seconds(rates, num_routed / num_chunks)
