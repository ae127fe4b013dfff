"""Samples: small layers in which one operator is met, and what the reader must say of it there.

A sample is a function of the tensors that `routings.inputs_of` names; the last call of the operator in it is looked at.
The pieces here give operands with a known meaning, as layers write them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from memfine_fx.passes.read.values import Rows
from tests.passes.read.routings import NUM_EXPERTS

__all__ = [
    "Database",
    "Sample",
    "claims",
    "counts_of",
    "dispatched",
    "expert_rows",
    "flat_rows",
    "make",
    "masks",
    "order_of",
    "places_of",
    "refused",
    "sorted_rows",
    "split_rows",
    "tokens_of",
]

K = 2


@dataclass(frozen=True)
class Sample:
    """One use of an operator.

    Args:
        layer: a function of the inputs, as attributes of its argument.
        says: class of the value that its first result gets; None where it must be refused.
        reason: what the refusal says.
        routings: names of the routings to try it with.
        is_silent: whether the value claims no number (an uninitialised tensor).
    """

    layer: Callable[[Any], Any]
    says: type | None = Rows
    reason: str = ""
    routings: tuple[str, ...] = ("plain",)
    is_silent: bool = False


Database = dict[Any, list[Sample]]
"""Samples by overload."""


def claims(says: type, layer: Callable[[Any], Any], *routings: str, is_silent: bool = False) -> Sample:
    """A sample whose value claims numbers."""
    return Sample(layer, says, routings=routings or ("plain",), is_silent=is_silent)


def refused(reason: str, layer: Callable[[Any], Any], *routings: str) -> Sample:
    """A sample that must be refused."""
    return Sample(layer, None, reason, routings or ("plain",))


# Pieces of layers.


def once(piece: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A piece that a layer makes once, however often it names it."""

    @functools.wraps(piece)
    def made(r: Any) -> Any:
        if piece not in r.pieces:
            r.pieces[piece] = piece(r)
        return r.pieces[piece]

    return made


@once
def order_of(r: Any) -> tuple[Any, Any]:
    """Experts in order [N], and the assignment of each row [N]."""
    found = r.index.reshape(-1).sort(stable=True)
    return found[0], found[1]


@once
def tokens_of(r: Any) -> Any:
    """The token of each row in expert order, [N]."""
    return order_of(r)[1] // K


@once
def sorted_rows(r: Any) -> Any:
    """[N,H] in expert order."""
    return r.hidden[tokens_of(r)]


@once
def flat_rows(r: Any) -> Any:
    """Results of the first projection in token order, [N,F]: every row with its own expert's weights."""
    rows = r.hidden.repeat_interleave(K, 0).unsqueeze(1)
    return torch.bmm(rows, r.up[r.index.reshape(-1)]).squeeze(1)


def places_of(r: Any, expert: int) -> tuple[Any, Any]:
    """Tokens and choices of one expert's rows."""
    found = torch.where(r.index == expert)
    return found[0], found[1]


def expert_rows(r: Any, expert: int) -> Any:
    """One expert's rows, [R,H]."""
    return r.hidden[places_of(r, expert)[0]]


def dispatched(r: Any, expert: int) -> tuple[Any, Any, Any]:
    """Tokens, choices and weighted results of one expert, [R,H]."""
    token, choice = places_of(r, expert)
    rows = (r.hidden[token] @ r.ups[expert]).relu() @ r.downs[expert]
    return token, choice, rows * r.weight[token, choice].unsqueeze(-1)


def make(r: Any, factory: Any, *args: Any, **kwargs: Any) -> Any:
    """A tensor made of sizes alone, as part of the layer."""
    return r.index.tracer.create_proxy("call_function", factory, args, kwargs)


@once
def masks(r: Any) -> Any:
    """Where each expert is named, [T,K,E]."""
    return F.one_hot(r.index, NUM_EXPERTS)


@once
def counts_of(r: Any) -> Any:
    """Rows of each expert, [E]."""
    return torch.bincount(r.index.reshape(-1), minlength=NUM_EXPERTS)


def split_rows(r: Any) -> list[Any]:
    """All experts' rows, each [R,H], taken out of expert order by their counts."""
    counts = counts_of(r)
    sizes = [counts[expert].item() for expert in range(NUM_EXPERTS)]
    parts = torch.split(sorted_rows(r), sizes)
    return [parts[expert] for expert in range(NUM_EXPERTS)]
