"""Hints: values for symbols that only sizes inside a graph have."""

from __future__ import annotations

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from memfine_fx.memory.step import GraphStep


def test_symbols_are_learned_from_products_and_from_parts_of_results() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    inner = mode.from_tensor(torch.empty(7, 2), symbolic_context=context, source=ConstantSource("inner"))
    other = mode.from_tensor(torch.empty(5, 2), symbolic_context=context, source=ConstantSource("other"))
    graph = fx.Graph()
    flat, pair = graph.placeholder("flat"), graph.placeholder("pair")
    flat.meta["val"] = inner.reshape(-1)
    pair.meta["val"] = (None, other)
    symbols = [str(one.shape[0].node.expr) for one in (inner, other)]  # type: ignore[union-attr]

    step = GraphStep(sizes={symbols[1]: 6})
    step.add_hints(graph)

    assert step.sizes == {symbols[0]: 7, symbols[1]: 6}  # what inputs have said stays
