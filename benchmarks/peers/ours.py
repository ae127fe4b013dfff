"""memfine_fx: rows and tokens axes, budgets, the paper's bins."""

import re
from typing import Any
from unittest import mock

import memfine_fx
from benchmarks.peers.base import Forward, Peer, Wrap
from benchmarks.peers.plain import eager, model_checkpointed
from benchmarks.records import Sizes
from memfine_fx.memory.closed_form import PAPER_BINS
from memfine_fx.runtime import mact


def layer(**fields: Any) -> Wrap:
    def wrap(module: Any, sizes: Sizes) -> Forward:
        forward: Forward = memfine_fx.optimize(module, config=memfine_fx.Config(**fields))
        return forward

    return wrap


def _model(wrap: Wrap, **options: Any) -> Wrap:
    def wrap_model(model: Any, sizes: Sizes) -> Forward:
        forward: Forward = memfine_fx.optimize(wrap(model, sizes), dynamic=True, **options)
        return forward

    return wrap_model


def rows_peer(name: str, **fields: Any) -> Peer:
    return Peer(name, layer(**fields), "first projection", is_compiled=True, is_memfine=True)


def _mact(most_rows: int) -> Wrap:
    """The paper's bins, chosen anew for every layer's rows as the paper does: fewer chunks are not waited for."""
    wrap_layer = layer(rows_per_chunk=most_rows, bins=PAPER_BINS)

    def wrap(module: Any, sizes: Sizes) -> Forward:
        forward = wrap_layer(module, sizes)

        def call(*args: Any) -> Any:
            with mock.patch.object(mact, "PATIENCE", 1):  # read where regions are made, in the first call
                return forward(*args)

        return call

    return wrap


def tokens_peer(name: str, **fields: Any) -> Peer:
    return Peer(name, layer(axis="tokens", **fields), "first projection", is_compiled=True, is_memfine=True)


_HEAD = memfine_fx.Config(returns_logits=False)  # logits of a training step are given up, so that the head is chunked
_BUDGET = r"memfine-(\d+(?:[kMGT]i?)?B)"

# A budget that nothing exceeds: regions keep what spares time, and nothing dense is computed again.
_UNLIMITED = "100TiB"

LAYER = (
    rows_peer("memfine"),
    tokens_peer("memfine-tokens"),
    Peer("memfine-unlimited", layer(memory_budget=_UNLIMITED), "nothing", is_compiled=True, is_memfine=True),
)
MODEL = (
    Peer("memfine", _model(eager), "first projection", is_compiled=True, is_memfine=True),
    Peer(
        "memfine-unlimited",
        _model(eager, memory_budget=_UNLIMITED),
        "nothing",
        is_compiled=True,
        is_memfine=True,
    ),
    Peer("memfine+checkpoint", _model(model_checkpointed), "forward", is_compiled=True, is_memfine=True),
    Peer("memfine+head", _model(eager, config=_HEAD), "first projection", is_compiled=True, is_memfine=True),
    Peer(
        "memfine+checkpoint+head",
        _model(model_checkpointed, config=_HEAD),
        "forward",
        is_compiled=True,
        is_memfine=True,
    ),
)


def model_family_member(name: str) -> Peer | None:
    """By number: memfine-600MiB, a budget for all of the step, parameters and gradients included."""
    if match := re.fullmatch(_BUDGET, name):
        wrap = _model(eager, memory_budget=match[1])
        return Peer(name, wrap, "first projection", is_compiled=True, is_memfine=True)
    return None


def family_member(name: str) -> Peer | None:
    """By number: memfine-R512 (rows a chunk), memfine-T256 (tokens a slice), memfine-2GiB (a budget),
    memfine-mact9000 (the paper's bins, with at most so many rows a chunk)."""
    if match := re.fullmatch(r"memfine-R(\d+)", name):
        return rows_peer(name, rows_per_chunk=int(match[1]))
    if match := re.fullmatch(r"memfine-T(\d+)", name):
        return tokens_peer(name, tokens_per_chunk=int(match[1]))
    if match := re.fullmatch(_BUDGET, name):
        return rows_peer(name, memory_budget=match[1])
    if match := re.fullmatch(r"memfine-mact(\d+)", name):
        return Peer(name, _mact(int(match[1])), "first projection", is_compiled=True, is_memfine=True)
    return None
