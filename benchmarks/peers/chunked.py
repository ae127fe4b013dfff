"""Token chunks under checkpoint: by hand, and with the tiled MLPs of DeepSpeed, Liger and Unsloth.

The tiled MLPs run the whole block, router included, once per tile in forward and once more in backward.

MemFine's methods by hand, in eager PyTorch, as the paper's own run was (its Method 1 is eager+checkpoint):

    fcda-cC        Method 2: token chunks, a fixed number C, each dispatched, computed and recomputed in turn
    fcda-mactS     Method 3: c = ceil(s'' / S), snapped up to {1, 2, 4, 8}, anew for every layer's rows s''
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.peers.base import Forward, Peer, Wrap, compiled, needs, num_token_chunks
from benchmarks.peers.plain import eager, model_checkpointed
from benchmarks.records import Sizes
from memfine_fx.memory.closed_form import chunk_count

NumChunks = Callable[[torch.Tensor, Sizes], int]  # of tokens [batch, sequence, H]


def by_hand(num_chunks: NumChunks = num_token_chunks) -> Wrap:
    """The loop that a user writes: token chunks, each under checkpoint."""

    def wrap(module: Any, sizes: Sizes) -> Forward:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            chunks = hidden.chunk(num_chunks(hidden, sizes), dim=1)
            return torch.cat([checkpoint(module, chunk, use_reentrant=False) for chunk in chunks], dim=1)

        return forward

    return wrap


def _fixed(number: str) -> NumChunks:
    return lambda hidden, sizes: int(number)


def _mact(most_rows: str) -> NumChunks:
    return lambda hidden, sizes: chunk_count(hidden.shape[0] * hidden.shape[1] * sizes.top_k, int(most_rows))


def _in_model(eager_model: Wrap) -> Wrap:
    """The same around the MoE block of each layer of a model."""

    def wrap(model: Any, sizes: Sizes) -> Forward:
        for layer in model.model.layers:
            layer.mlp.forward = _of_sequences(by_hand()(layer.mlp.forward, sizes))
        return eager_model(model, sizes)

    return wrap


def _of_sequences(run: Forward) -> Forward:
    """Sequences of a batch laid end to end, so that a chunk of them is contiguous, as blocks expect."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(hidden.reshape(1, -1, hidden.shape[-1]))
        return out.reshape(hidden.shape)

    return forward


def _deepspeed(module: Any, sizes: Sizes) -> Forward:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    return _tiled(module, sizes, TiledMLP.apply)


def _liger(module: Any, sizes: Sizes) -> Forward:
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    return _tiled(module, sizes, apply_tiled_mlp)


def _unsloth(module: Any, sizes: Sizes) -> Forward:
    """Its autograd function with our tile size; its own choice of one is a dense layer's formula."""
    from unsloth_zoo.tiled_mlp import TiledMLP

    return lambda hidden: TiledMLP.apply(module, module, hidden, False, num_token_chunks(hidden, sizes), None)


def _tiled(module: Any, sizes: Sizes, apply: Callable[..., torch.Tensor]) -> Forward:
    parameters = list(module.parameters())

    def one_tile(block: Any, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block(tokens.reshape(1, -1, tokens.shape[-1]))
        return out.reshape(tokens.shape)

    return lambda hidden: apply(one_tile, module, hidden, num_token_chunks(hidden, sizes), parameters)


LAYER = (
    Peer("diy", by_hand(), "forward"),
    Peer("diy+compile", compiled(by_hand()), "forward", is_compiled=True),
    Peer("deepspeed-tiled", _deepspeed, "forward", missing=needs("deepspeed")),
    Peer("liger-tiled", _liger, "forward", missing=needs("liger_kernel", "triton")),
    Peer("unsloth-tiled", _unsloth, "forward", missing=needs("unsloth_zoo", "triton", cuda=True)),
)
MODEL = (
    Peer("diy", _in_model(eager), "forward"),
    Peer("diy+compile", compiled(_in_model(eager), dynamic=True), "forward", is_compiled=True),
    Peer("diy+checkpoint", _in_model(model_checkpointed), "forward"),
)


def family_member(name: str) -> Peer | None:
    """By number: diy-c4, diy-c4+compile (by hand in so many chunks), fcda-c8, fcda-mact9000."""
    if match := re.fullmatch(r"(?:diy|fcda)-c(\d+)", name):
        return Peer(name, by_hand(_fixed(match[1])), "forward")
    if match := re.fullmatch(r"diy-c(\d+)\+compile", name):
        return Peer(name, compiled(by_hand(_fixed(match[1]))), "forward", is_compiled=True)
    if match := re.fullmatch(r"fcda-mact(\d+)", name):
        return Peer(name, by_hand(_mact(match[1])), "forward")
    return None
