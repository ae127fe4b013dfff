"""Two passes over Inductor's kernels, so that fusion does not keep memory alive.

`KernelOrder`, after fusion: fusing reductions of one shape (the gradients of several norm weights) makes one kernel of
members that lie far apart, and Inductor sorts the schedule by each kernel's first member. Everything the last member
needs then runs early, weight gradients wait, and the activations they read stay alive. The pass gives each kernel the
place of its last member. Inductor's own peak-memory reordering runs afterwards and keeps this order unless it knows a
better one.

`RegionDistance`, before fusion: kernels that neither feeds the other are fused where they read the same memory, such as
the rotary embedding of one layer's attention, recomputed in backward, with that of the next. Its results are then alive
while the experts between them run. Inductor refuses such fusions between kernels that are far apart in the graph; the
pass makes a chunked region count as far.
"""

from __future__ import annotations

import heapq
from typing import Any

from memfine_fx.compat.inductor import SchedulerPass, get_hash_for_files, region_operator
from memfine_fx.memory.liveness import OP_PHASES
from memfine_fx.passes.pass_list import run_pass

__all__ = ["KernelOrder", "RegionDistance"]


class KernelOrder(SchedulerPass):  # type: ignore[misc]  # its base depends on the version
    """Inductor scheduler pass (`_post_fusion_custom_pass`): fused kernels at the place of their last member."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return run_pass("kernel_order", nodes, lambda: _sorted_by_last_member(nodes), nodes)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _sorted_by_last_member(kernels: list[Any]) -> list[Any]:
    """Topological order that always takes the ready kernel whose last member stood first in the graph."""
    maker = {buffer: kernel for kernel in kernels for buffer in kernel.get_buffer_names()}
    readers: dict[Any, list[Any]] = {kernel: [] for kernel in kernels}
    num_waiting: dict[Any, int] = {}
    for kernel in kernels:
        needed = {maker[dep.name] for dep in kernel.unmet_dependencies if dep.name in maker} - {kernel}
        num_waiting[kernel] = len(needed)
        for other in needed:
            readers[other].append(kernel)
    rank = {
        kernel: (max(int(member.max_order) for member in kernel.get_nodes()), place)
        for place, kernel in enumerate(kernels)
    }
    ready = [(rank[kernel], kernel) for kernel in kernels if num_waiting[kernel] == 0]
    heapq.heapify(ready)
    ordered: list[Any] = []
    while ready:
        _, kernel = heapq.heappop(ready)
        ordered.append(kernel)
        for reader in readers[kernel]:
            num_waiting[reader] -= 1
            if num_waiting[reader] == 0:
                heapq.heappush(ready, (rank[reader], reader))
    return ordered if len(ordered) == len(kernels) else kernels


_DISTANCE = 1024
"""Places; Inductor fuses side by side up to 64."""
_REGIONS = frozenset(f"memfine::{name}" for name, phase in OP_PHASES.items() if phase in ("forward", "backward"))


class RegionDistance(SchedulerPass):  # type: ignore[misc]  # its base depends on the version
    """Inductor scheduler pass (`_pre_fusion_custom_pass`): places of kernels, with a gap after each region."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return run_pass("region_distance", nodes, lambda: _with_gaps(nodes), nodes)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _with_gaps(nodes: list[Any]) -> list[Any]:
    gap = 0
    for node in nodes:
        node.min_order += gap
        node.max_order += gap
        if region_operator(node) in _REGIONS:
            gap += _DISTANCE
    return nodes
