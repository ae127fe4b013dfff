"""What users would pick, each behind the same interface: a module in, a callable of its inputs out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

import memfine_fx
from benchmarks.records import Sizes

ROWS_PER_CHUNK = 2048

Forward = Callable[..., Any]
# What backward computes again of the expert forward: nothing, the first projection, or all of it.
Recompute = Literal["nothing", "first projection", "forward"]


@dataclass(frozen=True)
class Peer:
    name: str
    wrap: Callable[[Any, Sizes], Forward]
    recompute: Recompute = "nothing"
    is_compiled: bool = False
    is_memfine: bool = False


def _eager(module: Any, sizes: Sizes) -> Forward:
    forward: Forward = module
    return forward


def _checkpointed(module: Any, sizes: Sizes) -> Forward:
    return lambda hidden: checkpoint(module, hidden, use_reentrant=False)


def _do_it_yourself(module: Any, sizes: Sizes) -> Forward:
    """The loop that a user writes: token chunks, each under checkpoint."""
    num_chunks = max(1, sizes.routed_rows // ROWS_PER_CHUNK)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        chunks = hidden.chunk(num_chunks, dim=1)
        return torch.cat([checkpoint(module, chunk, use_reentrant=False) for chunk in chunks], dim=1)

    return forward


def _compiled(wrap: Callable[[Any, Sizes], Forward]) -> Callable[[Any, Sizes], Forward]:
    return lambda module, sizes: torch.compile(wrap(module, sizes))


def _memfine(**fields: Any) -> Callable[[Any, Sizes], Forward]:
    def wrap(module: Any, sizes: Sizes) -> Forward:
        forward: Forward = memfine_fx.optimize(module, config=memfine_fx.Config(**fields))
        return forward

    return wrap


def _model_checkpointed(model: Any, sizes: Sizes) -> Forward:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward: Forward = model
    return forward


def _model_compiled(wrap: Callable[[Any, Sizes], Forward]) -> Callable[[Any, Sizes], Forward]:
    return lambda model, sizes: torch.compile(wrap(model, sizes), dynamic=True)


def _model_memfine(wrap: Callable[[Any, Sizes], Forward]) -> Callable[[Any, Sizes], Forward]:
    def wrap_model(model: Any, sizes: Sizes) -> Forward:
        forward: Forward = memfine_fx.optimize(wrap(model, sizes), dynamic=True)
        return forward

    return wrap_model


_LAYER = (
    Peer("eager", _eager),
    Peer("eager+checkpoint", _checkpointed, "forward"),
    Peer("compile", _compiled(_eager), is_compiled=True),
    Peer("compile+checkpoint", _compiled(_checkpointed), "forward", is_compiled=True),
    Peer("diy", _do_it_yourself, "forward"),
    Peer("diy+compile", _compiled(_do_it_yourself), "forward", is_compiled=True),
    Peer("memfine", _memfine(), "first projection", is_compiled=True, is_memfine=True),
    Peer("memfine-R2048", _memfine(rows_per_chunk=2048), "first projection", is_compiled=True, is_memfine=True),
    Peer("memfine-R512", _memfine(rows_per_chunk=512), "first projection", is_compiled=True, is_memfine=True),
    Peer("memfine-tokens", _memfine(axis="tokens"), "forward", is_compiled=True, is_memfine=True),
    Peer(
        "memfine-R16384",
        _memfine(rows_per_chunk=16384),
        "first projection",
        is_compiled=True,
        is_memfine=True,
    ),
)
_MODEL = (
    Peer("eager", _eager),
    Peer("eager+checkpoint", _model_checkpointed, "forward"),
    Peer("compile", _model_compiled(_eager), is_compiled=True),
    Peer("compile+checkpoint", _model_compiled(_model_checkpointed), "forward", is_compiled=True),
    Peer("memfine", _model_memfine(_eager), "first projection", is_compiled=True, is_memfine=True),
    Peer(
        "memfine+checkpoint",
        _model_memfine(_model_checkpointed),
        "forward",
        is_compiled=True,
        is_memfine=True,
    ),
)

LAYER_PEERS = {peer.name: peer for peer in _LAYER}
MODEL_PEERS = {peer.name: peer for peer in _MODEL}
PEERS_OF = {"layer": LAYER_PEERS, "gradients": LAYER_PEERS, "model": MODEL_PEERS}
