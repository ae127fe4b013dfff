"""Records of a language model's head: the last projection, and the cross-entropy of its logits.

Legend: T tokens with a label, H hidden, V entries of the vocabulary, R tokens in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from memfine_fx.records import Where

__all__ = ["HeadDims", "HeadLoss", "HeadPlan", "HeadRegion", "ReturnedLogits", "RowMove"]


@dataclass(frozen=True)
class HeadLoss:
    """The loss that is computed of one token's logits, and how the losses of tokens are summed.

    Args:
        reduction: "mean" over the tokens that count, or "sum".
        ignore_index: label of tokens that do not count.
        label_smoothing: weight of the mean over the vocabulary, in [0, 1].
        scale: factor of the projection's results.
        softcap: if given, logits are softcap * tanh(scale * results), else scale * results.
    """

    reduction: Literal["mean", "sum"] = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class HeadDims:
    """Sizes of a head. T is text because it may be symbolic."""

    tokens: str
    hidden: int
    vocab: int


@dataclass(frozen=True)
class RowMove:
    """A step that picks or regroups tokens and leaves each token's logits whole.

    Args:
        kind: "index" for tensor[where], "reshape" for a shape whose last entry is V.
        argument: the index, or the shape without its last entry; nodes of the graph may stand in both.
    """

    kind: Literal["index", "reshape"]
    argument: Any


@dataclass(frozen=True)
class HeadRegion:
    """A head that can be chunked over tokens.

    Args:
        exit: the loss, after `divisor` where there is one.
        hidden: node [...,H].
        weight: node [V,H], or [H,V] if `is_transposed`.
        bias: node [V] or None.
        is_transposed: see `weight`.
        labels: integer node with as many entries as tokens.
        divisor: node of one number by which a sum is divided, or None.
        moves: what happens to the tokens between projection and loss.
        loss: see `HeadLoss`.
        logits_dtype: of the projection's results; differs from the weight's under autocast.
        nodes: from the projection to the exit.
        results: those of `nodes`, or casts of them, that the graph returns. They become None (`Config.returns_logits`),
            or are computed chunk by chunk.
        saves_logits: which of both.
        wanted: whether gradients of hidden, weight and bias are wanted.
        dims: sizes.
        where: of the projection.
    """

    exit: fx.Node
    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    is_transposed: bool
    labels: fx.Node
    divisor: fx.Node | None
    moves: tuple[RowMove, ...]
    loss: HeadLoss
    logits_dtype: torch.dtype
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    wanted: tuple[bool, bool, bool]
    dims: HeadDims
    where: Where
    saves_logits: bool = False


@dataclass(frozen=True)
class HeadPlan:
    """How a head runs in one step.

    Args:
        tokens_per_chunk: R, the most tokens whose logits exist at once.
        predicted_bytes: of a chunk's logits and what is computed on them, and the gradients that forward makes.
        reason: why this R.
    """

    tokens_per_chunk: int
    predicted_bytes: int
    reason: str

    @property
    def size_in_words(self) -> str:
        return f"{self.tokens_per_chunk} tokens"


@dataclass(frozen=True)
class ReturnedLogits:
    """Logits whose gradient is taken beside the graph that returns them.

    Args:
        result: their place among the graph's results.
        hidden: place of the hidden states [...,H] among the results of the rewritten graph, behind all others.
        weight, bias: places among its inputs.
        is_transposed: whether the weight is [H,V].
        dtype: of the projection; what was cast to another was cast behind it.
    """

    result: int
    hidden: int
    weight: int
    bias: int | None
    is_transposed: bool
    dtype: torch.dtype
