"""Records of a step's memory, edited: what is kept lives from forward to where backward last reads it."""

from __future__ import annotations

import sympy

from memfine_fx.memory.edits import keeping_in_region, keeping_results, sized
from memfine_fx.memory.liveness import Allocation, Call, GraphMemory

S = sympy.Symbol("s", positive=True, integer=True)
FORWARD = GraphMemory((Allocation("mm", 4 * S, 1, 2), Allocation("out", S, 3, None)), (Call(2, "a", "forward"),), 5)
BACKWARD = GraphMemory((Allocation("mm", 4 * S, 2, 4), Allocation("grad", S, 1, None)), (Call(3, "a", "backward"),), 5)
PAIR = (sized(FORWARD, {"s": 10}), sized(BACKWARD, {"s": 10}))


def live(memory: GraphMemory) -> list[int]:
    return memory.live_bytes({}, lambda call: 0)


def test_sizes_become_numbers() -> None:
    assert live(PAIR[0]) == FORWARD.live_bytes({"s": 10}, lambda call: 0) == [0, 40, 0, 10, 10]


def test_a_kept_result_outlives_forward_and_is_there_when_backward_begins() -> None:
    forward, backward = keeping_results(PAIR, ["mm"])
    assert live(forward) == [0, 40, 40, 50, 50]
    assert live(backward) == [40, 50, 50, 50, 10]


def test_what_a_region_keeps_lives_from_its_forward_to_its_backward() -> None:
    forward, backward = keeping_in_region(PAIR, "a", "projections", 7)
    assert live(forward) == [0, 40, 7, 17, 17]
    assert live(backward) == [7, 17, 57, 57, 10]
    assert {call.keep for memory in (forward, backward) for call in memory.calls} == {"projections"}
    assert live(forward.without({"kept by a"})) == live(PAIR[0])


def test_a_region_that_is_not_there_changes_nothing() -> None:
    assert keeping_in_region(PAIR, "b", "projections", 7) == PAIR
