"""What is read of a graph that stays as torch.compile takes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from memfine_fx.compiler.recorder import record_plain
from memfine_fx.memory.step import GraphStep
from memfine_fx.runtime.accumulation import Accumulation

NUM_LAYERS, SIDE = 3, 16
TOKENS_BYTES = 4 * 2 * 32 * SIDE * 4
"""Bytes of one [B=2,S=32,4*SIDE] fp32 tensor."""


class Attending(nn.Module):
    """Attention layers, each in a checkpoint that keeps its random state, as checkpoints do by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 * SIDE, 12 * SIDE, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + checkpoint(attended, layer, hidden, use_reentrant=False)
        return hidden.square().mean()


def attended(layer: nn.Module, hidden: Tensor) -> Tensor:
    parts = layer(hidden).unflatten(-1, (12, SIDE)).transpose(1, 2).chunk(3, 1)
    attention = scaled_dot_product_attention(*(part.sin() for part in parts), is_causal=True)
    return attention.transpose(1, 2).flatten(2)


def test_checkpointed_attention_that_keeps_its_random_state_keeps_no_queries() -> None:
    step = GraphStep()

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return record_plain(graph_module, inputs, "graph", step, alone)

    torch._dynamo.reset()
    hidden = torch.randn(2, 32, 4 * SIDE, requires_grad=True)
    torch.compile(Attending(), backend=backend)(hidden).backward()
    assert step.forward is not None and step.backward is not None
    sizes = step.forward.bytes_at(step.sizes)
    saved = {one.name: size for one, size in zip(step.forward.allocations, sizes, strict=True) if one.stop is None}
    states = [name for name in saved if name.startswith("getitem")]
    assert [saved[name] for name in states] == NUM_LAYERS * [torch.get_rng_state().nbytes]
    assert [name for name in saved if name not in states] == ["add", "add_1", "mean", "mul"], "what layers begin with"
    again = [one for one in step.backward.allocations if one.name in ("getitem_3", "getitem_8", "getitem_13")]
    assert [one.num_bytes for one in again] == NUM_LAYERS * [TOKENS_BYTES], "attention's results, recomputed"


def alone(keeps_graph: bool) -> contextlib.AbstractContextManager[Accumulation]:
    return contextlib.nullcontext(Accumulation())
