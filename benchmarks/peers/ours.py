"""memfine_fx: rows and tokens axes, budgets, the paper's bins."""

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import memfine_fx
from benchmarks.peers.base import Forward, Peer, Recompute, Wrap
from benchmarks.peers.plain import eager, model_checkpointed
from benchmarks.records import Sizes
from memfine_fx.memory.closed_form import PAPER_BINS
from memfine_fx.runtime import mact

_HEAD = memfine_fx.Config(returns_logits=False)  # logits of a training step are given up, so that the head is chunked
_BUDGET = r"memfine-(\d+(?:[kMGT]i?)?B)"
# A budget that nothing exceeds: regions keep what spares time, and nothing costly is recomputed.
_UNLIMITED = "100TiB"


def _layer(name: str, recompute: Recompute = "first projection", **fields: Any) -> Peer:
    def wrap(module: Any, sizes: Sizes) -> Forward:
        forward: Forward = memfine_fx.optimize(module, config=memfine_fx.Config(**fields))
        return forward

    return Peer(name, wrap, recompute, is_compiled=True, is_memfine=True)


def _model(name: str, recompute: Recompute = "first projection", inner: Wrap = eager, **options: Any) -> Peer:
    def wrap(model: Any, sizes: Sizes) -> Forward:
        forward: Forward = memfine_fx.optimize(inner(model, sizes), dynamic=True, **options)
        return forward

    return Peer(name, wrap, recompute, is_compiled=True, is_memfine=True)


def _by_layer(model: Any, sizes: Sizes) -> Forward:
    """Each decoder layer compiled alone, by the backend's name: equal layers share a graph; all else is eager."""
    forward = eager(model, sizes)
    for layer in model.model.layers:
        layer.compile(backend="memfine", dynamic=True)
    return forward


def _mact(name: str, most_rows: int) -> Peer:
    """The paper's bins, chosen anew for every layer's rows as the paper does: fewer chunks are not waited for."""
    peer = _layer(name, rows_per_chunk=most_rows, bins=PAPER_BINS)

    def wrap(module: Any, sizes: Sizes) -> Forward:
        forward = peer.wrap(module, sizes)

        def call(*args: Any) -> Any:
            with mock.patch.object(mact, "PATIENCE", 1):  # read where regions are made, in the first call
                return forward(*args)

        return call

    return replace(peer, wrap=wrap)


LAYER = (
    _layer("memfine"),
    _layer("memfine-tokens", axis="tokens"),
    _layer("memfine-unlimited", "nothing", memory_budget=_UNLIMITED),
)
MODEL = (
    _model("memfine"),
    _model("memfine-least", memory_budget="least"),
    _model("memfine-unlimited", "nothing", memory_budget=_UNLIMITED),
    _model("memfine+checkpoint", "forward", model_checkpointed),
    Peer("memfine-by-layer", _by_layer, "first projection", is_compiled=True, is_memfine=True),
    _model("memfine+head", config=_HEAD),
    _model("memfine+checkpoint+head", "forward", model_checkpointed, config=_HEAD),
)


def model_family_member(name: str) -> Peer | None:
    """By number: memfine-600MiB, a budget for all of the step, parameters and gradients included."""
    match = re.fullmatch(_BUDGET, name)
    return _model(name, memory_budget=match[1]) if match else None


def family_member(name: str) -> Peer | None:
    """By number: memfine-R512 (rows a chunk), memfine-T256 (tokens a slice), memfine-2GiB (a budget),
    memfine-mact9000 (the paper's bins, with at most so many rows a chunk)."""
    if match := re.fullmatch(r"memfine-R(\d+)", name):
        return _layer(name, rows_per_chunk=int(match[1]))
    if match := re.fullmatch(r"memfine-T(\d+)", name):
        return _layer(name, axis="tokens", tokens_per_chunk=int(match[1]))
    if match := re.fullmatch(_BUDGET, name):
        return _layer(name, memory_budget=match[1])
    if match := re.fullmatch(r"memfine-mact(\d+)", name):
        return _mact(name, int(match[1]))
    return None
