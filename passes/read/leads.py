"""Leads: what the leading dimensions of a tensor index, as groups of atoms.

An atom is one thing that entries vary over; a dimension is a group of atoms flattened into it, in order:

    t  tokens                     b, s  the two dimensions of tokens that were never flattened ("bs" is "t"; where
                                        tokens have one dimension, b is all of it and s is one)
    k  choices of a token         e     experts
    r  routed rows in expert order; of a copy of a loop's body: the rows of its expert
    0, 1, ...  further dimensions of rows that stand in their expert's slots (capacity, groups)
    ?  something repeated that is none of these

["t"] is [T], ["t","k"] is [T,K], ["tk"] is [N] in token order, ["e","t"] is [E,T], ["et"] is [E*T]. The empty
group is a dimension of size one, which broadcasts and stays so when it is expanded ("the same for all of them").
Reshaping regroups atoms, permuting reorders groups; neither can change which row an entry belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from memfine_fx.passes.dataflow import same_size

__all__ = ["Lead", "Size", "join", "regroup", "without_ones"]

Size = int | torch.SymInt


class Lead:
    """Leading dimensions; equal leads are one object, so `is` compares them."""

    _known: ClassVar[dict[tuple[str, ...], Lead]] = {}

    NONE: ClassVar[Lead]
    TOKEN: ClassVar[Lead]
    FLAT: ClassVar[Lead]
    SORTED: ClassVar[Lead]
    EXPERT: ClassVar[Lead]

    groups: tuple[str, ...]

    def __new__(cls, *groups: str) -> Lead:
        canonical = tuple(group.replace("bs", "t") for group in groups)
        lead = cls._known.get(canonical)
        if lead is None:
            lead = cls._known.setdefault(canonical, super().__new__(cls))
            lead.groups = canonical
        return lead

    @property
    def num_dims(self) -> int:
        return len(self.groups)

    @property
    def atoms(self) -> str:
        return "".join(self.groups)

    @property
    def is_dense(self) -> bool:
        """Whether it holds an entry for every token and expert, chosen or not."""
        return "e" in self.atoms and any(atom in self.atoms for atom in "tbs")

    def without(self, dim: int) -> Lead:
        return Lead(*self.groups[:dim], *self.groups[dim + 1 :])

    def with_group(self, dim: int, group: str) -> Lead:
        """This lead with another group in the place of dimension `dim`."""
        return Lead(*self.groups[:dim], group, *self.groups[dim + 1 :])

    def inserting(self, dim: int, group: str = "") -> Lead:
        """This lead with a new dimension in front of dimension `dim`."""
        return Lead(*self.groups[:dim], group, *self.groups[dim:])

    @property
    def in_words(self) -> str:
        """For reasons of refusals."""
        names = {(): "nothing routed", ("tk",): "[N] in token order", ("r",): "[N] in expert order"}
        return names.get(self.groups) or "[" + ",".join("*".join(g.upper()) or "1" for g in self.groups) + "]"

    def __repr__(self) -> str:
        return f"Lead{self.groups}"


Lead.NONE = Lead()
Lead.TOKEN = Lead("t")
Lead.FLAT = Lead("tk")
Lead.SORTED = Lead("r")
Lead.EXPERT = Lead("e")


def join(left: Lead, right: Lead, size_of: Callable[[str], Size]) -> Lead | None:
    """The lead of a broadcast of two tensors with equally many leading dimensions, or None if rows would meet."""
    groups = []
    for a, b in zip(left.groups, right.groups, strict=True):
        if a and b and a != b and without_ones(a, size_of) != without_ones(b, size_of):
            return None
        # They are equal but for atoms of size one: the longer group names more of what stands there.
        groups.append(max(a, b, key=len))
    lead = Lead(*groups)
    # An atom that stands twice would pair every entry with every other one.
    again = [atom for atom in set(lead.atoms) - {"?"} if lead.atoms.count(atom) > 1]
    return None if without_ones("".join(again), size_of) else lead  # [T,1] and [1,T]: every token with every other


def regroup(lead: Lead, shape: Sequence[Size], size_of: Callable[[str], Size]) -> Lead | None:
    """The lead of a reshape to `shape`, or None where a dimension mixes part of the lead with something else.

    Args:
        lead: of the source.
        shape: the target's, leading dimensions first.
        size_of: size of an atom; "t" may be the product of "b" and "s".
    """
    # A reshape keeps the order of entries, so equal sizes are the same dimensions, whatever they are called.
    if len(shape) >= lead.num_dims and all(
        same_size(size, _size(group, size_of)) for size, group in zip(shape, lead.groups, strict=False)
    ):
        return lead
    # A reshape may end a dimension between batch and sequence, never within one atom.
    atoms = list(lead.atoms.replace("t", "bs"))
    if "?" in atoms:
        return None
    groups: list[str] = []
    for size in shape:
        group = _take(atoms, size, size_of) if atoms else None
        if group is None:
            return None
        groups.append(group)
        if not atoms:
            return Lead(*groups)
    # What is left over has one entry only, so it may stand in the last dimension.
    if groups and not without_ones("".join(atoms), size_of):
        return Lead(*groups[:-1], groups[-1] + "".join(atoms))
    return None


def _take(atoms: list[str], size: Size, size_of: Callable[[str], Size]) -> str | None:
    """Pop the atoms whose sizes multiply to `size`, with size-one atoms that follow; "" for a new dimension of one."""
    # With T or K of one, the dimension of one is that atom, and not a new one.
    starts_with_one = same_size(size, 1) and same_size(size_of(atoms[0]), 1)
    group = atoms.pop(0) if starts_with_one else ""
    while atoms and not same_size(_size(group, size_of), size):
        group += atoms.pop(0)
    if not same_size(_size(group, size_of), size):
        return None
    # An atom of size one fits anywhere; it stays with what it followed, or the next dimension would not find its first.
    while atoms and group and same_size(size_of(atoms[0]), 1):
        group += atoms.pop(0)
    return group


def _size(group: str, size_of: Callable[[str], Size]) -> Size:
    product: Size = 1
    for atom in group:
        product = product * size_of(atom)
    return product


def without_ones(group: str, size_of: Callable[[str], Size]) -> str:
    """The atoms of a group that vary."""
    return "".join(atom for atom in group.replace("t", "bs") if not same_size(size_of(atom), 1))
