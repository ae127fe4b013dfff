"""PyTorch alone: eager, torch.compile, activation checkpointing, and torch's own memory budget."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.base import Forward, Peer, Wrap, compiled
from benchmarks.records import Sizes

# Where the ratio of torch._functorch.config.activation_memory_budget is tried.
BUDGET_RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)


def eager(module: Any, sizes: Sizes) -> Forward:
    forward: Forward = module
    return forward


def checkpointed(module: Any, sizes: Sizes) -> Forward:
    return lambda hidden: checkpoint(module, hidden, use_reentrant=False)


def looped(module: Any, sizes: Sizes) -> Forward:
    """transformers' own loop over the experts that were hit."""
    experts = module.experts
    while hasattr(experts, "base_layer"):
        experts = experts.base_layer
    experts.config._experts_implementation = "eager"
    forward: Forward = module
    return forward


def model_checkpointed(model: Any, sizes: Sizes) -> Forward:
    """Each layer, the way transformers does it."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward: Forward = model
    return forward


def _with_budget(ratio: float, *, dynamic: bool | None) -> Wrap:
    """The partitioner keeps activations up to this share of what it would keep unbounded."""

    def compile_with_budget(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=ratio):
            return compile_fx(gm, inputs)

    def wrap(module: Any, sizes: Sizes) -> Forward:
        # A backend of its own: Dynamo would take what it has compiled for an equal module under another ratio.
        forward: Forward = torch.compile(module, dynamic=dynamic, backend=compile_with_budget)
        return forward

    return wrap


def budget_peer(ratio: float, *, dynamic: bool | None) -> Peer:
    return Peer(f"compile-budget{ratio:g}", _with_budget(ratio, dynamic=dynamic), is_compiled=True)


LAYER = (
    Peer("eager", eager),
    Peer("eager+checkpoint", checkpointed, "forward"),
    Peer("compile", compiled(eager), is_compiled=True),
    Peer("compile+checkpoint", compiled(checkpointed), "forward", is_compiled=True),
    *(budget_peer(ratio, dynamic=None) for ratio in BUDGET_RATIOS),
    Peer("loop", looped),
)
MODEL = (
    Peer("eager", eager),
    Peer("eager+checkpoint", model_checkpointed, "forward"),
    Peer("compile", compiled(eager, dynamic=True), is_compiled=True),
    Peer("compile+checkpoint", compiled(model_checkpointed, dynamic=True), "forward", is_compiled=True),
    *(budget_peer(ratio, dynamic=True) for ratio in BUDGET_RATIOS),
)
