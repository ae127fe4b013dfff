"""Which numbers an abstract value claims: every value of the lattice, made concrete for one routing.

A claim is a float64 tensor of the shape asked for; NaN stands where the value says nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from memfine_fx.passes.read.dim_labels import DimLabels
from memfine_fx.passes.read.expressions import Input, Param
from memfine_fx.passes.read.values import (
    Combined,
    Coordinates,
    Counts,
    Fill,
    Ids,
    Leaf,
    LoopIteration,
    Mask,
    Partial,
    Rows,
    Taken,
)
from tests.passes.read.routings import NUM_EXPERTS, Assignment, Routing

__all__ = ["Claims", "numbers_of"]

Shape = Sequence[int]


@dataclass(frozen=True)
class _Place:
    """What an entry of a tensor is about, as far as its labels say."""

    token: int | None = None
    choice: int | None = None
    expert: int | None = None


@dataclass
class Claims:
    """What values mean at one moment of a walk.

    Args:
        routing: on numbers.
        outer: numbers of the nodes outside.
        params, columns: of the expressions so far: what copies that were unified read.
    """

    routing: Routing
    outer: dict[fx.Node, Any]
    params: dict[fx.Node, Param] = field(default_factory=dict)
    columns: tuple[fx.Node, ...] = ()
    _known: dict[Any, Tensor] = field(default_factory=dict)

    # Places.

    def place(self, labels: DimLabels, indices: Shape, iteration: LoopIteration) -> _Place:
        """What the entry at these indices of the labels is about."""
        found: dict[str, int] = {}
        for group, position in zip(labels.groups, indices, strict=True):
            for axis in reversed(group.replace("t", "bs")):
                size = self._size(axis)
                position, found[axis] = (0, position) if size is None else divmod(position, size)
        if "r" in found:
            return self._routed_place(found["r"], found.get("e"), iteration, found.get("k"))
        token = found["b"] * self.size_of_s() + found["s"] if "b" in found or "s" in found else None
        choice = found.get("k", 0 if self.routing.top_k == 1 else iteration.choice)
        return _Place(token, choice, found.get("e", iteration.expert))

    def size_of_s(self) -> int:
        return self.routing.token_shape[1] if len(self.routing.token_shape) == 2 else 1

    def _size(self, axis: str) -> int | None:
        """None for an axis that always stands alone."""
        sizes = {"b": self.routing.token_shape[0], "s": self.size_of_s(), "k": self.routing.top_k, "e": NUM_EXPERTS}
        return sizes.get(axis)

    def _routed_place(
        self, position: int, expert: int | None, iteration: LoopIteration, choice_of_token: int | None
    ) -> _Place:
        """The routed row at a position, or one of its token's choices; without an order only its expert is known."""
        token, choice = self.rows(LoopIteration(iteration.expert, iteration.choice, iteration.order or "t"))[position]
        choice = choice if choice_of_token is None else choice_of_token
        own = self.routing.expert_of((token, choice))
        if not iteration.order:
            return _Place(None, None, own)
        return _Place(token, choice, own if expert is None else expert)

    def rows(self, iteration: LoopIteration) -> list[Assignment]:
        """The assignments that a copy is about, in expert order."""
        return [one for one in self.routing.in_order(iteration.order) if self.is_about(iteration, one)]

    def is_about(self, iteration: LoopIteration, one: Assignment) -> bool:
        return iteration.expert in (None, self.routing.expert_of(one)) and iteration.choice in (None, one[1])

    def assignments(self, place: _Place) -> list[Assignment]:
        """Those that an entry about a token can mean: none where the token did not choose the expert."""
        choices = range(self.routing.top_k) if place.choice is None else [place.choice]
        named = [(place.token, choice) for choice in choices]
        return [one for one in named if place.expert in (None, self.routing.expert_of(one))]  # type: ignore[arg-type, misc]

    # Expressions.

    def row(self, expr: fx.Node, place: _Place, iteration: LoopIteration, *, per_row: bool) -> list[Tensor]:
        """What an expression gives for an entry: one row for each assignment that the entry can mean."""
        if place.token is None:
            return [self._computed(expr, place.expert, None, iteration, False)[0]]
        if place.choice is None and place.expert is None:
            tokens = tuple((token, None) for token in range(self.routing.num_tokens))
            return [self._computed(expr, None, tokens, iteration, per_row)[place.token if per_row else 0]]
        rows = []
        for one in self.assignments(place):
            expert = self.routing.expert_of(one)
            mates = tuple(mate for mate in self.routing.all() if self.routing.expert_of(mate) == expert)
            rows.append(self._computed(expr, expert, mates, iteration, per_row)[mates.index(one) if per_row else 0])
        return rows

    def whole(self, expr: fx.Node) -> Tensor:
        """An expression that no row is part of."""
        return self._computed(expr, None, None, LoopIteration(), False)

    def _computed(
        self, expr: fx.Node, expert: int | None, rows: Any, iteration: LoopIteration, per_row: bool
    ) -> Tensor:
        key = expr, expert, rows, iteration
        if key not in self._known:
            env: dict[fx.Node, Any] = {}

            def of(node: fx.Node) -> Any:
                if node not in env:
                    env[node] = self._run(node, of, expert, rows, iteration)
                return env[node]

            self._known[key] = of(expr)
        result = self._known[key]
        assert not per_row or result.shape[0] == len(rows), f"{expr} gives {tuple(result.shape)} for {len(rows)} rows"
        return result

    def _run(
        self, node: fx.Node, of: Callable[[fx.Node], Any], expert: int | None, rows: Any, iteration: LoopIteration
    ) -> Any:
        if node.op == "placeholder":
            return self._input(node, expert, rows, iteration)
        args, kwargs = fx.map_arg((node.args, node.kwargs), of)
        return node.target(*args, **kwargs)  # type: ignore[operator]  # an overload

    def _input(self, node: fx.Node, expert: int | None, rows: Any, iteration: LoopIteration) -> Tensor:
        one: Input = node.meta["input"]
        param = self.params.get(node)
        if param is not None:
            assert expert is not None or param.kind == "shared", f"{one} without an expert"
            numbers = self.outer[param.nodes[expert or 0] if param.kind == "each" else param.nodes[0]]
            return numbers[expert] if param.kind == "expert" else numbers  # type: ignore[no-any-return]
        if one.role == "column" and self.columns:
            assert expert is not None
            return self._of_rows(one, self.outer[self.columns[expert]], expert, rows)
        numbers = self.outer[one.outer]
        if one.role in ("whole", "entry"):
            return numbers if one.role == "whole" else numbers[one.expert]  # type: ignore[no-any-return]
        if one.role == "table":
            assert expert is not None, f"{one} without an expert"
            return numbers[expert]  # type: ignore[no-any-return]
        return self._of_rows(one, numbers, expert, rows)

    def _of_rows(self, one: Input, numbers: Tensor, expert: int | None, rows: Any) -> Tensor:
        """[R,...] of a role that rows read by their own places."""
        assert rows is not None, f"{one} where nothing is known of a token"
        tokens, choices = ([row[part] for row in rows] for part in (0, 1))
        if one.role == "rows":
            return self._by_token(numbers)[tokens]
        if one.role == "column":
            return numbers.reshape(self.routing.num_tokens)[tokens]
        width = numbers.shape[-1] if one.is_gathered else self.routing.top_k
        assert numbers.shape in ((*self.routing.token_shape, width), self.routing.token_shape * (width == 1)), one
        flat = numbers.reshape(self.routing.num_tokens, width)
        assert None not in choices, f"{one} where no choice is known"
        return flat[tokens, [expert] * len(rows)] if one.is_gathered else flat[tokens, choices]

    def _by_token(self, numbers: Tensor) -> Tensor:
        """[T,...] of tokens that may stand as [B,S,...]."""
        tokens = self.routing.token_shape
        num_dims = len(tokens) if tuple(numbers.shape[: len(tokens)]) == tokens else 1
        assert math.prod(numbers.shape[:num_dims]) == self.routing.num_tokens, tuple(numbers.shape)
        return numbers.reshape(self.routing.num_tokens, *numbers.shape[num_dims:])


def numbers_of(value: Any, shape: Shape, claims: Claims) -> Tensor:
    """The numbers that a value says a tensor of this shape holds, NaN where it says nothing."""
    out = torch.full(tuple(shape), math.nan, dtype=torch.float64)
    for kind, fill in _FILLS.items():
        if isinstance(value, kind):
            fill(value, out, claims)
            return out
    return out


def _each(labels: DimLabels, out: Tensor, claims: Claims, iteration: LoopIteration) -> Any:
    """Every entry of labels, and what it is about."""
    assert out.ndim >= labels.num_dims, f"{labels} of shape {tuple(out.shape)}"
    for indices in itertools.product(*map(range, out.shape[: labels.num_dims])):
        yield indices, claims.place(labels, indices, iteration)


def _set(out: Tensor, indices: Any, row: Any) -> None:
    """Write a claim; two claims of one entry must agree."""
    own = torch.as_tensor(row, dtype=torch.float64)
    assert own.ndim == 0 or own.shape == out[indices].shape, (
        f"a row of {tuple(own.shape)} at {tuple(out[indices].shape)}"
    )
    is_free = out[indices].isnan()
    assert bool((is_free | torch.isclose(out[indices], own)).all()), "an entry of which two numbers are claimed"
    out[indices] = own


def _fill_rows(value: Rows, out: Tensor, claims: Claims) -> None:
    if value.labels is DimLabels.NONE:
        if value.expr is not None:
            out.copy_(claims.whole(value.expr))
        return
    for indices, place in _each(value.labels, out, claims, value.iteration):
        is_off = place.token is not None and not claims.assignments(place)
        if is_off and value.fill_value is not None:
            _set(out, indices, value.fill_value)
        elif not is_off and value.expr is not None:
            for row in claims.row(value.expr, place, value.iteration, per_row=value.per_row):
                _set(out, indices, row)


def _fill_mask(value: Mask, out: Tensor, claims: Claims) -> None:
    # A comparison of all rows in expert order names an expert too, and keeps them all.
    are_own = "r" in value.labels.axes and len(claims.rows(value.iteration)) == out.shape[0]
    iteration = value.iteration if are_own else replace(value.iteration, expert=None)
    for indices, place in _each(value.labels, out, claims, iteration):
        expert = place.expert if "e" in value.labels.axes else value.iteration.expert
        named = claims.assignments(replace(place, expert=None))
        is_named = any(claims.routing.expert_of(one) == expert for one in named)
        if not (is_named and value.is_part):
            _set(out, indices, float(is_named is not value.is_negated))


def _fill_ids(value: Ids, out: Tensor, claims: Claims) -> None:
    if value.is_iota:
        out.copy_(torch.arange(out.numel()).reshape(out.shape))
    if "?" in value.labels.axes or value.names == "#":
        return
    for indices, place in _each(value.labels, out, claims, value.iteration):
        if place.token is None and value.names == "e":
            _set(out, indices, place.expert)
        elif place.token is not None and place.choice is None and set(value.names) <= set("tbs"):
            _set(out, indices, _number(value, (place.token, 0), claims))
        else:
            for one in claims.assignments(place):
                _set(out, indices, _number(value, one, claims))


def _number(value: Ids, one: Assignment, claims: Claims) -> int:
    """What ids name of an assignment."""
    token, choice = one
    batch, step = divmod(token, claims.size_of_s())
    parts = {"e": claims.routing.expert_of(one), "t": token, "k": choice, "b": batch, "s": step}
    if value.names == "r":
        return claims.routing.in_order(value.iteration.order or "t").index(one)
    sizes = {"t": claims.routing.num_tokens, "k": claims.routing.top_k, "s": claims.size_of_s(), "e": NUM_EXPERTS}
    number = 0
    for axis in value.names:
        number = number * sizes.get(axis, 1) + parts[axis]
    return number


def _fill_coordinates(value: Coordinates, out: Tensor, claims: Claims) -> None:
    for column, names in enumerate(value.names):
        _fill_ids(Ids(names, DimLabels.SORTED, iteration=value.iteration), out[:, column], claims)


def _fill_counts(value: Counts, out: Tensor, claims: Claims) -> None:
    counts = torch.tensor(claims.routing.counts())
    numbers = counts.cumsum(0) if value.are_ends else counts
    out.copy_(numbers if value.expert is None else numbers[value.expert])


def _fill_all(value: Fill, out: Tensor, claims: Claims) -> None:
    if value.value is not None:
        out.fill_(value.value)


def _fill_leaf(value: Leaf, out: Tensor, claims: Claims) -> None:
    numbers = claims.outer[value.node]
    assert numbers.shape == out.shape, f"{value.node} of {tuple(numbers.shape)} stands for {tuple(out.shape)}"
    out.copy_(numbers)


def _fill_combined(value: Combined, out: Tensor, claims: Claims) -> None:
    _add_up(out, value.base, [(LoopIteration(), value.expr)], claims)


def _fill_partial(value: Partial, out: Tensor, claims: Claims) -> None:
    parts = value.parts
    if value.labels is None:
        _add_up(out, value.base, parts, claims)
        return
    for indices, place in _each(value.labels, out, claims, LoopIteration(order=parts[0][0].order)):
        for iteration, expr in parts:
            for one in claims.assignments(place):
                if claims.is_about(iteration, one):
                    (row,) = claims.row(expr, _Place(*one), iteration, per_row=True)
                    _set(out, indices, row)


def _add_up(out: Tensor, base: fx.Node | None, parts: list[tuple[LoopIteration, fx.Node]], claims: Claims) -> None:
    """The base, and every assignment's contribution added to its token."""
    out.zero_()
    if base is not None:
        out.copy_(claims.outer[base])
    num_tokens = claims.routing.num_tokens
    for iteration, expr in parts:
        for token, choice in claims.routing.all():
            if claims.is_about(iteration, (token, choice)):
                (row,) = claims.row(expr, _Place(token, choice), iteration, per_row=True)
                out.view(num_tokens, -1)[token] += row.flatten()


def _fill_taken(value: Taken, out: Tensor, claims: Claims) -> None:
    sizes = {"t": claims.routing.num_tokens, "k": claims.routing.top_k, "b": claims.routing.token_shape[0]}
    shape = [math.prod(sizes[axis] for axis in group) for group in value.names]
    held = numbers_of(value.sum, (*shape, *out.shape[1:]), claims)
    places = [torch.empty(len(out), dtype=torch.float64) for _ in value.names]
    for names, place in zip(value.names, places, strict=True):
        _fill_ids(Ids(names, DimLabels.SORTED, iteration=value.iteration), place.fill_(math.nan), claims)
    out.copy_(held[tuple(place.long() for place in places)])
    if value.added is not None:
        out.add_(numbers_of(value.added, out.shape, claims))


_FILLS: dict[type, Callable[[Any, Tensor, Claims], None]] = {
    Rows: _fill_rows,
    Mask: _fill_mask,
    Ids: _fill_ids,
    Coordinates: _fill_coordinates,
    Counts: _fill_counts,
    Fill: _fill_all,
    Leaf: _fill_leaf,
    Combined: _fill_combined,
    Partial: _fill_partial,
    Taken: _fill_taken,
}
