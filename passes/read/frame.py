"""The start and the end of a walk: the frame of a routing decision, rows in slots, the exit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from memfine_fx.passes.dataflow import same_size, static_size
from memfine_fx.passes.read.dim_labels import DimLabels, Size
from memfine_fx.passes.read.values import Combined, Rows

__all__ = ["Exit", "Frame", "Slots"]


@dataclass(frozen=True)
class Frame:
    """The routing decision that a walk starts from: its index, its sizes and what is proved of them.

    Args:
        index: node of the experts' ids.
        token_shape: [T] or [B,S], may be symbolic.
        top_k: K, a number.
        has_choices: whether the index has a dimension for a token's choices.
        is_distinct: whether it is proved that a token never names an expert twice.
        num_experts: E, where the routing itself says it: only a hint.
        bound: a number that ids are proved to be below, and not negative; None where nothing is proved.
        is_mask: whether the index is a mask [T,K,E] with dropped choices, which ids are made of.
    """

    index: fx.Node
    token_shape: tuple[Size, ...]
    top_k: int
    has_choices: bool
    is_distinct: bool
    num_experts: int | None = None
    bound: int | None = None
    is_mask: bool = False

    @property
    def labels(self) -> DimLabels:
        """Return the labels of the index: dimensions of tokens, with K as a dimension of its own or in the last one."""
        tokens = ("t",) if len(self.token_shape) == 1 else ("b", "s")
        return DimLabels(*tokens, "k") if self.has_choices else DimLabels(*tokens[:-1], tokens[-1] + "k")

    @property
    def num_tokens(self) -> Size:
        product: Size = 1
        for size in self.token_shape:
            product = product * size
        return product

    @property
    def num_rows(self) -> Size:
        return self.num_tokens * self.top_k

    def is_index_like(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may be an index: integers, one a token or one for each of its choices."""
        is_integer = not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
        tokens = self.token_shape
        has_choices = tensor.ndim == len(tokens) + 1 and static_size(tensor.shape[-1]) is not None
        fits = has_choices or (tensor.ndim == len(tokens) and not self.has_choices)
        return is_integer and fits and all(map(same_size, tensor.shape, tokens))


@dataclass(frozen=True)
class Slots:
    """Rows that stand in their experts' slots, [...,E,...,H]: capacity models."""

    root: fx.Node
    expert_dim: int
    shape: tuple[Size, ...]

    @property
    def labels(self) -> DimLabels:
        groups = [str(dim) for dim in range(len(self.shape) - 1)]
        groups[self.expert_dim] = "e"
        return DimLabels(*groups)


class Exit(Exception):
    """The walk is over: `node` of Dynamo's graph holds `value`, complete."""

    def __init__(self, node: fx.Node, value: Combined | Rows) -> None:
        super().__init__(str(node))
        self.node, self.value = node, value
