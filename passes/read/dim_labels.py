"""Labels of a tensor's leading dimensions: what each indexes, as a group of axes.

An axis is one thing that entries vary over; a dimension is a group of axes flattened into it, in order:

    t  tokens                     b, s  the two dimensions of tokens that were never flattened ("bs" is "t"; where
                                        tokens have one dimension, b is all of it and s is one)
    k  choices of a token         e     experts
    r  routed rows in expert order; of a copy of a loop's body: the rows of its expert
    0, 1, ...  further dimensions of rows that stand in their expert's slots (capacity, groups)
    ?  something repeated that is none of these

["t"] is [T], ["t","k"] is [T,K], ["tk"] is [N] in token order, ["e","t"] is [E,T], ["et"] is [E*T]. The empty
group is a dimension of size one, which broadcasts and stays so when it is expanded ("the same for all of them").
Reshaping regroups axes, permuting reorders groups; neither can change which row an entry belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from memfine_fx.passes.dataflow import same_size

__all__ = ["DimLabels", "Size", "join", "regroup", "without_ones"]

Size = int | torch.SymInt


class DimLabels:
    """The labels of leading dimensions; equal ones are one object, so `is` compares them."""

    _known: ClassVar[dict[tuple[str, ...], DimLabels]] = {}

    NONE: ClassVar[DimLabels]
    TOKEN: ClassVar[DimLabels]
    FLAT: ClassVar[DimLabels]
    SORTED: ClassVar[DimLabels]
    EXPERT: ClassVar[DimLabels]

    groups: tuple[str, ...]

    def __new__(cls, *groups: str) -> DimLabels:
        canonical = tuple(group.replace("bs", "t") for group in groups)
        labels = cls._known.get(canonical)
        if labels is None:
            labels = cls._known.setdefault(canonical, super().__new__(cls))
            labels.groups = canonical
        return labels

    @property
    def num_dims(self) -> int:
        return len(self.groups)

    @property
    def axes(self) -> str:
        return "".join(self.groups)

    @property
    def is_dense(self) -> bool:
        """Whether it holds an entry for every token and expert, chosen or not."""
        return "e" in self.axes and any(axis in self.axes for axis in "tbs")

    def without(self, dim: int) -> DimLabels:
        return DimLabels(*self.groups[:dim], *self.groups[dim + 1 :])

    def with_group(self, dim: int, group: str) -> DimLabels:
        """These labels with another group in the place of dimension `dim`."""
        return DimLabels(*self.groups[:dim], group, *self.groups[dim + 1 :])

    def inserting(self, dim: int, group: str = "") -> DimLabels:
        """These labels with a new dimension in front of dimension `dim`."""
        return DimLabels(*self.groups[:dim], group, *self.groups[dim:])

    @property
    def in_words(self) -> str:
        """For reasons of refusals."""
        names = {(): "nothing routed", ("tk",): "[N] in token order", ("r",): "[N] in expert order"}
        return names.get(self.groups) or "[" + ",".join("*".join(g.upper()) or "1" for g in self.groups) + "]"

    def __repr__(self) -> str:
        return f"DimLabels{self.groups}"


DimLabels.NONE = DimLabels()
DimLabels.TOKEN = DimLabels("t")
DimLabels.FLAT = DimLabels("tk")
DimLabels.SORTED = DimLabels("r")
DimLabels.EXPERT = DimLabels("e")


def join(left: DimLabels, right: DimLabels, size_of: Callable[[str], Size]) -> DimLabels | None:
    """The labels of a broadcast of two tensors with equally many leading dimensions, or None if rows would meet."""
    groups = []
    for a, b in zip(left.groups, right.groups, strict=True):
        if a and b and a != b and without_ones(a, size_of) != without_ones(b, size_of):
            return None
        # They are equal but for axes of size one: the longer group names more of what stands there.
        groups.append(max(a, b, key=len))
    labels = DimLabels(*groups)
    # An axis that stands twice would pair every entry with every other one.
    again = [axis for axis in set(labels.axes) - {"?"} if labels.axes.count(axis) > 1]
    return None if without_ones("".join(again), size_of) else labels  # [T,1] and [1,T]: every token with every other


def regroup(labels: DimLabels, shape: Sequence[Size], size_of: Callable[[str], Size]) -> DimLabels | None:
    """The labels of a reshape to `shape`, or None where a dimension mixes part of them with something else.

    Args:
        labels: of the source.
        shape: the target's, leading dimensions first.
        size_of: size of an axis; "t" may be the product of "b" and "s".
    """
    # A reshape keeps the order of entries, so equal sizes are the same dimensions, whatever they are called.
    if len(shape) >= labels.num_dims and all(
        same_size(size, _size(group, size_of)) for size, group in zip(shape, labels.groups, strict=False)
    ):
        return labels
    # A reshape may end a dimension between batch and sequence, never within one axis.
    axes = list(labels.axes.replace("t", "bs"))
    if "?" in axes:
        return None
    groups: list[str] = []
    for size in shape:
        group = _take(axes, size, size_of) if axes else None
        if group is None:
            return None
        groups.append(group)
        if not axes:
            return DimLabels(*groups)
    # What is left over has one entry only, so it may stand in the last dimension.
    if groups and not without_ones("".join(axes), size_of):
        return DimLabels(*groups[:-1], groups[-1] + "".join(axes))
    return None


def _take(axes: list[str], size: Size, size_of: Callable[[str], Size]) -> str | None:
    """Pop the axes whose sizes multiply to `size`, with size-one axes that follow; "" for a new dimension of one."""
    # With T or K of one, the dimension of one is that axis, and not a new one.
    starts_with_one = same_size(size, 1) and same_size(size_of(axes[0]), 1)
    group = axes.pop(0) if starts_with_one else ""
    while axes and not same_size(_size(group, size_of), size):
        group += axes.pop(0)
    if not same_size(_size(group, size_of), size):
        return None
    # An axis of size one fits anywhere; it stays with what it followed, or the next dimension would not find its first.
    while axes and group and same_size(size_of(axes[0]), 1):
        group += axes.pop(0)
    return group


def _size(group: str, size_of: Callable[[str], Size]) -> Size:
    product: Size = 1
    for axis in group:
        product = product * size_of(axis)
    return product


def without_ones(group: str, size_of: Callable[[str], Size]) -> str:
    """The axes of a group that vary."""
    return "".join(axis for axis in group.replace("t", "bs") if not same_size(size_of(axis), 1))
