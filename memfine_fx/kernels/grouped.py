"""A layer's calls of torch's grouped products, as bodies issue them; the kernels' time is compared with theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from memfine_fx.kernels.sorting import Routing
from memfine_fx.kernels.tables import Tables, standing

__all__ = ["grouped_calls"]

Call = Callable[[], object]


def grouped_calls(hidden: torch.Tensor, routing: Routing, tables: Tables) -> Iterator[Call]:
    """Yield the calls of a step with saved products, each to be timed alone: their results go nowhere.

    Rows are gathered, multiplied, added to tokens in fp32; then gradients likewise, and those of tables are copied to
    where they belong. A copy that moves as many bytes stands for what lies between products.

    Args:
        hidden: [T,H], in bf16.
        routing: of all rows, in one chunk.
        tables: in bf16.
    """
    product = functools.partial(torch.nn.functional.grouped_mm, offs=routing.offsets[1:])
    tokens = routing.order.long() // routing.top_k
    rows = hidden[tokens]
    activated = hidden.new_zeros(rows.shape[0], tables.width)
    projected = [hidden.new_zeros(rows.shape[0], projection.shape[1]) for projection in tables.projections]
    sums = torch.zeros_like(hidden, dtype=torch.float32)
    moved = [hidden.new_zeros(rows.shape[0], columns * tables.width) for columns in (1, 1, 3, 3)]

    def gather() -> None:
        hidden.index_select(0, tokens)

    def add_to_tokens() -> None:
        sums.index_add_(0, tokens, rows.float())

    for _ in range(2):  # forward's and backward's
        yield gather
        yield add_to_tokens
    yield gather  # the tokens again, for gradients of the projections
    yield functools.partial(moved[0].copy_, moved[1])  # the activation, of two columns into one
    yield functools.partial(moved[2].copy_, moved[3])  # its gradient, of three columns into three
    down = standing(tables.down)
    for table, left in zip(map(standing, tables.projections), projected, strict=True):
        yield functools.partial(product, rows, table.mT)
        yield functools.partial(product, left, table)
        yield functools.partial(product, left.mT, rows)
        yield table.clone
    yield functools.partial(product, activated, down.mT)
    yield functools.partial(product, rows, down)
    yield functools.partial(product, rows.mT, activated)
    yield down.clone
