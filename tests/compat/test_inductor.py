"""What is copied of a graph from Dynamo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import sizevars
from torch._inductor.codegen import cpp

from memfine_fx.compat.functorch import compile_on_aot_autograd, min_cut_partition
from memfine_fx.compat.inductor import _remembering_indices, captured_copy


def known_parameters(copied: Callable[[fx.GraphModule], fx.GraphModule]) -> int:
    """Inputs that the partitioner takes for parameters, of a copy in the place of the graph that Dynamo gave."""
    counts: list[int] = []

    def partition(gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        counts.append(len(options["static_lifetime_input_indices"]))
        return min_cut_partition(gm, joint_inputs, **options)

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        return compile_on_aot_autograd(copied(graph_module), list(inputs), partition, lambda backward: backward)

    torch._dynamo.reset()
    model = torch.nn.Linear(8, 8)
    torch.compile(model, backend=backend)(torch.randn(4, 8)).sum().backward()
    return counts[0]


def test_a_copy_knows_which_inputs_are_parameters() -> None:
    """Else the partitioner saves their transposed views, which are then counted as results."""
    assert known_parameters(captured_copy) == 2
    assert known_parameters(copy.deepcopy) == 0, "a plain copy would do"


def test_as_many_index_expressions_as_a_deep_model_has_are_worked_out_once() -> None:
    variable = sympy.Symbol("d0", integer=True)
    before = sizevars.stride_at_vec_range
    with _remembering_indices():
        assert cpp.stride_at_vec_range is sizevars.stride_at_vec_range is not before
        for _ in range(2):
            strides = [sizevars.stride_at_vec_range(number * variable, variable, 16) for number in range(2000, 2300)]
        cached: Any = sizevars.stride_at_vec_range
        assert strides == list(range(2000, 2300)) and cached.cache_info().hits >= 300
    assert cpp.stride_at_vec_range is sizevars.stride_at_vec_range is before
    with _remembering_indices():
        assert sizevars.stride_at_vec_range is cached, "answers outlive one compilation"
