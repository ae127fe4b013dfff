"""What is said of AOT autograd, against what it does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from memfine_fx.compat.functorch import compile_on_aot_autograd, frees_tangents, min_cut_partition
from memfine_fx.compat.inductor import mark_boxed

Call = Callable[[list[Any]], Any]


def test_tangents_are_dropped_during_a_backward_exactly_where_that_is_said() -> None:
    is_alive: list[bool] = []

    def watched(backward: Call) -> Call:
        def call(args: list[Any]) -> Any:
            tangents = [weakref.ref(one) for one in args[-2:]]
            results = backward(args)
            is_alive.extend(tangent() is not None for tangent in tangents)
            return results

        return mark_boxed(call)

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_on_aot_autograd(graph_module, inputs, min_cut_partition, watched)

    @torch.compile(backend=backend)
    def both(given: Tensor) -> tuple[Tensor, Tensor]:
        return given.exp(), given.sin()

    given = torch.ones(8, requires_grad=True)
    used, _ = both(given)  # the gradient of the other is zeros
    (used * 3).sum().backward()
    assert torch.allclose(given.grad, 3 * given.detach().exp())
    assert is_alive == [not frees_tangents()] * 2
