"""Keep Inductor's kernels in the order of the graph, where fusion has dragged them apart.

Fusing reductions of one shape (the gradients of several norm weights) makes one kernel of members that lie far
apart, and Inductor sorts the schedule by each kernel's first member: everything the last member needs then runs
before what stood between, weight gradients wait, and the activations they read stay alive. Here each kernel takes
the place of its last member.

Inductor's own peak-memory reordering runs afterwards and keeps this order unless it knows a better one.
"""

from __future__ import annotations

import heapq
from typing import Any

from memfine_fx.compat.inductor import SchedulerPass, get_hash_for_files
from memfine_fx.passes.pass_list import run_pass

__all__ = ["KernelOrder"]


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
    rank = {kernel: (_last_member(kernel), place) for place, kernel in enumerate(kernels)}
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


def _last_member(kernel: Any) -> int:
    return max(int(member.max_order) for member in kernel.get_nodes())
