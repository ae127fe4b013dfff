"""The lattice: what a tensor of functional ATen is, seen from the routing of one layer.

One value per tensor. What the routing is about is a pair (token, choice), an *assignment*; a value says for every entry
of its tensor which assignment it belongs to (`labels`, and `iteration` inside a loop over experts) and, for floats,
which expression of one expert's rows computes it. Order is bookkeeping: gathering and sorting change the labels, never
the expression.

    Leaf      from outside, its role decided by the first use           Ids       integers that name something
    Fill      one number everywhere                                     Mask      whether the routing names an expert
    Counts    rows per expert, or where they end                        Rows      floats, row by row
    Partial   results of some copies of a loop, put together so far     Combined  rows summed to their tokens: the exit
    Taken     what a partial sum held at a copy's places                Unknown   not provable, and why
    Part      packed numbers, experts one behind the other

Rules (`rules/`) give values to results; nothing here decides what an operation means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from memfine_fx.errors import CannotChunk
from memfine_fx.passes.read.dim_labels import DimLabels

__all__ = [
    "ALL",
    "Combined",
    "Coordinates",
    "Counts",
    "Fill",
    "Ids",
    "Leaf",
    "LoopIteration",
    "Mask",
    "Part",
    "Partial",
    "Rows",
    "Taken",
    "Unknown",
    "is_dispatched",
    "merged",
]


@dataclass(frozen=True)
class LoopIteration:
    """Which assignments a value is about: those of one expert, of one of a token's choices, or both; all by default.

    Args:
        expert, choice: numbers, or None where it is about all of them.
        order: in which order an expert's routed rows stand: as the tokens ("t"), as choices before tokens ("kt"), as an
            unstable sort of the one or the other left them ("t sort", "kt sort"); "" for values that are not routed
            rows in expert order.
    """

    expert: int | None = None
    choice: int | None = None
    order: str = ""

    @property
    def is_all(self) -> bool:
        """Whether it is about every expert and every choice."""
        return self.expert is None and self.choice is None

    @property
    def unordered(self) -> LoopIteration:
        """The same of values that are no routed rows."""
        return LoopIteration(self.expert, self.choice)


ALL = LoopIteration()


def merged(left: LoopIteration, right: LoopIteration) -> LoopIteration | None:
    """Return what two values that meet are about together; None where they contradict each other."""
    # A value that is about all experts says nothing of one, so it agrees with any.
    pairs = ((left.expert, right.expert), (left.choice, right.choice), (left.order or None, right.order or None))
    if any(a is not None and b is not None and a != b for a, b in pairs):
        return None
    expert, choice, order = (b if a is None else a for a, b in pairs)
    return LoopIteration(expert, choice, order or "")  # type: ignore[arg-type]  # numbers first, then a string


@dataclass(frozen=True)
class Leaf:
    """A tensor from outside the region, at this node of Dynamo's graph; the first use decides its role.

    `why` tells what could not be proved of one that the routing reaches.
    """

    node: fx.Node
    why: CannotChunk | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Unknown:
    """No proof holds here.

    Args:
        refusal: where the proof stopped and why.
        is_dispatched: whether rows or weights of experts are in it, so that it cannot be left outside the region.
    """

    refusal: CannotChunk
    is_dispatched: bool


@dataclass(frozen=True)
class Fill:
    """A tensor of one value (None: uninitialised) that something is written into."""

    value: float | None


@dataclass(frozen=True)
class Ids:
    """Integers that name something about the assignments in their labels.

    Args:
        names: what each entry names, in axes: "e" its expert, "tk" its flat position t*K + k, "t" its token, "k" its
            choice, "b" or "s" its token's coordinate, "r" its place in expert order, "#" just 0, 1, 2, ...
        labels: every dimension of the tensor.
        is_iota: whether they stand in order, 0 .. n-1.
        iteration: whose places they are, in a loop.
        is_distinct: of experts' ids: whether it is proved that no token names an expert twice.
        bound: of experts' ids: a number that they are proved to be below, and not negative; None where nothing is
            proved. A rule that makes other ids says which of the two facts hold of them; by default neither does.
    """

    names: str
    labels: DimLabels
    is_iota: bool = False
    iteration: LoopIteration = ALL
    is_distinct: bool = False
    bound: int | None = None


@dataclass(frozen=True)
class Mask:
    """Numbers or truths that are one where the routing names the expert, zero elsewhere (or the other way round).

    Args:
        labels: every dimension; experts are one of them, or `iteration.expert` is a number.
        iteration: what it is about.
        is_negated: whether it is zero where the expert is named.
        is_part: whether it may be zero for named experts too (dropped tokens).
        is_distinct: whether it is proved that no token names an expert twice, so that its choices can be put together.
    """

    labels: DimLabels
    iteration: LoopIteration = ALL
    is_negated: bool = False
    is_part: bool = False
    is_distinct: bool = False


@dataclass(frozen=True)
class Coordinates:
    """Places where a mask of one expert holds, [R, number of its dimensions]; `names` says what each column names."""

    names: tuple[str, ...]
    iteration: LoopIteration


@dataclass(frozen=True)
class Counts:
    """Rows of every expert, [E] (or of one: `expert`); where they end, with `are_ends`."""

    are_ends: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class Rows:
    """A float tensor, row by row.

    Args:
        labels: leading dimensions; the others are in the expression.
        expr: node of the expert function: [R, rest...], or [1, rest...] where `per_row` is False (an expert's
            parameter, the same for all its rows); for DimLabels.NONE the tensor itself. None where no expression of one
            row gives it (a softmax over experts): then only `fill_value` is known.
        per_row: whether rows of one expert may differ.
        fill_value: with dense labels, or about one expert of every token: the value of each entry whose token did not
            choose that expert; None where it is not one known number.
        iteration: which assignments it is about.
        is_dispatched: whether it is part of what the experts compute, so that it cannot be left outside the region.
    """

    labels: DimLabels
    expr: fx.Node | None
    per_row: bool = True
    fill_value: float | None = None
    iteration: LoopIteration = ALL
    is_dispatched: bool = False


@dataclass(frozen=True)
class Part:
    """Packed numbers, [E*m,...]: entries [e*m, (e+1)*m) are expert e's, and `expr`, [m,...], gives them."""

    expr: fx.Node


@dataclass(frozen=True)
class Combined:
    """The exit: rows summed back to their tokens.

    Args:
        expr: one contribution, [R,H].
        base: outer node that they are added to, or None.
    """

    expr: fx.Node
    base: fx.Node | None = None


@dataclass(frozen=True)
class Partial:
    """Results of some copies of a loop's body, put together so far.

    Args:
        labels: where rows are put, each in its own place; None where they are summed to their tokens.
        parts: of each copy, in the order in which they came: the copy and its results.
        base: outer node that they are added to, or None for zeros.
        node: of Dynamo's graph, which holds all this.
        before: what `node` added to; None where it began.
    """

    labels: DimLabels | None
    parts: tuple[tuple[LoopIteration, fx.Node], ...]
    base: fx.Node | None
    node: fx.Node
    before: Partial | None = field(default=None, compare=False, repr=False)

    @property
    def iterations(self) -> set[LoopIteration]:
        return {iteration.unordered for iteration, _ in self.parts}

    def first(self, num_parts: int) -> Partial | None:
        """The sum when it held so many parts, if a node of its own held that."""
        later, sum_then = self, self.before
        while sum_then is not None and len(sum_then.parts) > num_parts:
            later, sum_then = sum_then, sum_then.before
        # Two parts that one node added at once were never alone in a node that could be the exit.
        is_held = sum_then is not None and len(sum_then.parts) == num_parts and sum_then.node is not later.node
        return sum_then if is_held else None


@dataclass(frozen=True)
class Taken:
    """Entries of a sum that were read at the places of a copy, and the rows added to them since."""

    sum: Any
    names: tuple[str, ...]
    iteration: LoopIteration
    added: Rows | None = None


def is_dispatched(value: Any) -> bool:
    """Whether a value is part of what the experts compute."""
    if isinstance(value, Taken):
        return value.added is not None
    return isinstance(value, (Combined, Partial)) or getattr(value, "is_dispatched", False) is True
