"""Proofs of marks in graphs that are written by hand, where no rewriting of a loop is known to make them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from memfine_fx.errors import GuardRefused
from memfine_fx.passes.ops import target_name
from memfine_fx.passes.read.guards import OpenCut, discharge_guards
from memfine_fx.passes.read.marker import COUNT_ROWS, COVERED, ENTER_NUMBER, ENTER_TENSOR, LEAVE_BODY

IDS = torch.tensor([0, 2, 1])
"""Three ids; none is 3."""


def discharged(function: Callable[[Tensor], Any]) -> tuple[fx.GraphModule, list[OpenCut]]:
    """The graph of a function of `IDS` without its marks, and what is left to prove.

    Raises:
        GuardRefused: a mark is not proved.
    """
    captured: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        captured.append(graph_module)
        return graph_module.forward

    sizes_of_data = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with sizes_of_data, pytest.raises(AssertionError, match="taken out of a graph"):
        torch.compile(function, backend=backend, fullgraph=True)(IDS)
    return captured[0], discharge_guards(captured[0])


def skipped_without_rows(ids: Tensor) -> Tensor:
    """Places [n] of the ids of expert 3; a body begins that is skipped where there are none."""
    mask = ids == 3
    ENTER_TENSOR(mask.any(), "==", 0, True, "here:1")
    return torch.where(mask)[0]


def test_an_empty_tensor_of_a_body_may_be_concatenated_after_it() -> None:
    def function(ids: Tensor) -> Tensor:
        places = skipped_without_rows(ids)
        LEAVE_BODY("here:1")
        return torch.cat([places, ids])

    assert discharged(function)[1] == []


def test_other_tensors_of_a_body_may_not_be_concatenated_after_it() -> None:
    def function(ids: Tensor) -> Tensor:
        number = skipped_without_rows(ids).sum().reshape(1)
        LEAVE_BODY("here:1")
        return torch.cat([number, ids])

    with pytest.raises(GuardRefused, match="computed there and read after it"):
        discharged(function)


@pytest.mark.parametrize(("experts", "num_cuts"), [((0, 1, 2), 0), ((0, 0, 2), 1)])
def test_counts_cover_rows_where_each_expert_is_counted_once(experts: tuple[int, ...], num_cuts: int) -> None:
    def function(ids: Tensor) -> tuple[Tensor, ...]:
        entries = COUNT_ROWS(ids % 3, 3)
        counts = [entries[expert].item() for expert in experts]
        COVERED(ids, counts, "here:1")
        return ids.split(counts)

    assert len(discharged(function)[1]) == num_cuts


def test_a_number_that_marks_and_its_sign_alone_read_is_not_taken_from_the_device() -> None:
    def function(ids: Tensor) -> Tensor:
        number = (ids == 3).sum().item()
        torch._check(number >= 0)
        ENTER_NUMBER(number, "==", 0, True, "here:1")
        LEAVE_BODY("here:1")
        return ids + 1

    graph_module, _ = discharged(function)
    assert "item" not in map(target_name, graph_module.graph.nodes)


def test_many_sums_of_one_tensor_are_told_apart_in_little_time() -> None:
    def function(ids: Tensor) -> Tensor:
        total = ids
        for _ in range(500):  # their number doubles with each of them, and Python's stack ends before
            total = total + total
        torch.ops.memfine.enter_tensor.default((ids == 3).any(), "==", 0, True, "here:1")
        torch.ops.memfine.leave_body.default("here:1")
        return total + 1

    started = time.process_time()
    discharged(function)
    assert time.process_time() - started < 60
