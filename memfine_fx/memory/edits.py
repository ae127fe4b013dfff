"""A step's memory with other things kept, without partitioning its graph again.

Records are edited, not graphs: a result that forward keeps lives to its end, and in backward from the beginning to
where it was last read; what a region keeps lives from its op in forward to its op in backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import sympy

from memfine_fx.memory.liveness import Allocation, Call, GraphMemory
from memfine_fx.records import Keep

__all__ = ["keeping_in_region", "keeping_results", "sized"]

Pair = tuple[GraphMemory, GraphMemory]
"""Forward and backward."""


def sized(memory: GraphMemory, sizes: Mapping[str, int]) -> GraphMemory:
    """The record with numbers in place of expressions."""
    allocations = (
        replace(one, num_bytes=sympy.Integer(num_bytes))
        for one, num_bytes in zip(memory.allocations, memory.bytes_at(sizes), strict=True)
    )
    return replace(memory, allocations=tuple(allocations))


def keeping_results(pair: Pair, names: Collection[str]) -> Pair:
    """With the storages of these names kept, which backward as it is makes again."""
    wanted = set(names)
    forward, backward = pair
    return (
        replace(
            forward,
            allocations=tuple(replace(one, stop=None) if one.name in wanted else one for one in forward.allocations),
        ),
        replace(
            backward,
            allocations=tuple(replace(one, start=0) if one.name in wanted else one for one in backward.allocations),
        ),
    )


def keeping_in_region(pair: Pair, site: str, keep: Keep, num_bytes: int) -> Pair:
    """With so many more bytes kept by one region."""
    forward, backward = pair
    name, size = f"kept by {site}", sympy.Integer(num_bytes)
    run, back = _position(forward, site), _position(backward, site)
    if run is None or back is None:
        return pair
    return (
        _with(forward, Allocation(name, size, run, None), site, keep),
        _with(backward, Allocation(name, size, 0, back + 1, is_input=True), site, keep),
    )


def _position(memory: GraphMemory, site: str) -> int | None:
    return next((call.position for call in memory.calls if call.site == site and call.phase != "route"), None)


def _with(memory: GraphMemory, allocation: Allocation, site: str, keep: Keep) -> GraphMemory:
    calls = tuple(_keeping(call, keep) if call.site == site else call for call in memory.calls)
    return replace(memory, allocations=(*memory.allocations, allocation), calls=calls)


def _keeping(call: Call, keep: Keep) -> Call:
    return call if call.phase == "route" else replace(call, keep=keep)
