"""What one compiled graph holds over its run, symbolically: a record, and its peak at given sizes.

Terms
    position      a statement of the compiled wrapper, counted from 0
    allocation    bytes alive from one position up to, not including, another; None: past the end
    call          a chunked region that runs at a position, with a working set the graph does not show
    live bytes    at a position: the allocations alive there, and the working set of a call there
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import sympy

from memfine_fx.records import Keep

__all__ = ["OP_PHASES", "Allocation", "Call", "CountedInputs", "GraphMemory", "Peak", "Phase", "call_of"]

Phase = Literal["route", "forward", "backward", "head"]

OP_PHASES: dict[str, Phase] = {
    "route": "route",
    "route_shared": "route",
    "experts": "forward",
    "experts_keeping": "forward",
    "experts_backward": "backward",
    "experts_backward_kept": "backward",
    "head_loss": "head",
}
"""Our operations, without their namespace."""


@dataclass(frozen=True)
class Allocation:
    """A storage: who made it, its bytes, and the positions between which it lives."""

    name: str
    num_bytes: sympy.Expr
    start: int
    stop: int | None
    is_input: bool = False


@dataclass(frozen=True)
class CountedInputs:
    """Inputs of a graph, by name, whose bytes are the run's; all others are the caller's and count nothing.

    Args:
        freed: nobody else holds them; they go after their last reader.
        held: somebody else holds them for as long as the graph runs.
    """

    freed: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A chunked region's op at a position; `site` is the key of its live region, "" for routing."""

    position: int
    site: str
    phase: Phase
    keep: Keep = "nothing"


def call_of(position: int, phase: Phase, texts: Sequence[str]) -> Call:
    """The call of an op with these text arguments: its site, and what it keeps where it has a choice."""
    site, keep, *_ = (*texts, "", "")
    return Call(position, site, phase, cast("Keep", keep or "nothing"))


Workspace = Callable[[Call], int]
"""Bytes that a call of a region needs beyond what the graph shows."""


@dataclass(frozen=True)
class Peak:
    """The most live bytes of a graph, where, and of what.

    Args:
        num_bytes: live bytes at the peak.
        position: where.
        terms: (name, bytes) of what is alive there, largest first.
    """

    num_bytes: int
    position: int
    terms: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class GraphMemory:
    """One graph's allocations and calls.

    Args:
        allocations: storages, in the order in which they are made; inputs that count first.
        calls: chunked regions, in order.
        num_positions: length of the run.
    """

    allocations: tuple[Allocation, ...]
    calls: tuple[Call, ...]
    num_positions: int

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """Sizes that are not known before the run (batch, sequence), by name."""
        found = {symbol for one in self.allocations for symbol in one.num_bytes.free_symbols}
        return tuple(sorted(found, key=str))

    def without(self, names: Collection[str]) -> GraphMemory:
        """The record without the storages of these names, with regions that keep nothing."""
        allocations = tuple(one for one in self.allocations if one.name not in names)
        return replace(self, allocations=allocations, calls=tuple(replace(one, keep="nothing") for one in self.calls))

    def live_bytes(self, sizes: Mapping[str, int], workspace: Workspace) -> list[int]:
        """Live bytes at each position.

        Args:
            sizes: value of each symbol, by name.
            workspace: bytes that a call of a region needs beyond what the graph shows.
        """
        changes = [0] * (self.num_positions + 1)
        for allocation, num_bytes in zip(self.allocations, self.bytes_at(sizes), strict=True):
            changes[allocation.start] += num_bytes
            if allocation.stop is not None:
                changes[allocation.stop] -= num_bytes
        live: list[int] = []
        total = 0
        for change in changes[: self.num_positions]:
            total += change
            live.append(total)
        for call in self.calls:
            live[call.position] += workspace(call)
        return live

    def peak(self, sizes: Mapping[str, int], workspace: Workspace, *, num_terms: int = 8) -> Peak:
        """The peak at given sizes, with its largest terms."""
        live = self.live_bytes(sizes, workspace)
        if not live:
            return Peak(0, 0, ())
        position = max(range(len(live)), key=live.__getitem__)
        terms = [
            (one.name, num_bytes)
            for one, num_bytes in zip(self.allocations, self.bytes_at(sizes), strict=True)
            if one.start <= position and (one.stop is None or position < one.stop)
        ]
        terms += [(f"working set of {call.phase}", workspace(call)) for call in self.calls if call.position == position]
        terms.sort(key=lambda term: -term[1])
        return Peak(live[position], position, tuple(terms[:num_terms]))

    def peak_expression(self, workspace: Callable[[Call], sympy.Expr | int]) -> sympy.Expr:
        """The peak as one expression in the graph's symbols.

        Args:
            workspace: working set of a call, as an expression.
        """
        changes: list[sympy.Expr] = [sympy.Integer(0)] * (self.num_positions + 1)
        for one in self.allocations:
            changes[one.start] += one.num_bytes
            if one.stop is not None:
                changes[one.stop] -= one.num_bytes
        calls = {call.position: workspace(call) for call in self.calls}
        total: sympy.Expr = sympy.Integer(0)
        peaks: set[sympy.Expr] = set()
        for position, change in enumerate(changes[: self.num_positions]):
            total = sympy.expand(total + change)
            peaks.add(total + calls.get(position, sympy.Integer(0)))
        return sympy.Max(*_undominated(peaks)) if peaks else sympy.Integer(0)

    @property
    def left_bytes(self) -> sympy.Expr:
        """Bytes that outlive the run: results, and what a forward saves for its backward."""
        kept = (one.num_bytes for one in self.allocations if one.stop is None)
        return sum(kept, sympy.Integer(0))

    def bytes_at(self, sizes: Mapping[str, int]) -> Sequence[int]:
        """Bytes of each allocation, in order."""
        exprs = [one.num_bytes for one in self.allocations]
        symbols = self.symbols
        if not symbols:
            return [int(expr) for expr in exprs]
        missing = [str(symbol) for symbol in symbols if str(symbol) not in sizes]
        if missing:
            raise KeyError(f"no value for {missing[0]}; sizes are needed for {[str(symbol) for symbol in symbols]}")
        distinct = tuple(dict.fromkeys(exprs))
        values = _evaluator(symbols, distinct)(*(sizes[str(symbol)] for symbol in symbols))
        found = dict(zip(distinct, map(int, values), strict=True))
        return [found[expr] for expr in exprs]


@functools.lru_cache(maxsize=256)
def _evaluator(symbols: Sequence[sympy.Symbol], exprs: Sequence[sympy.Expr]) -> Callable[..., Sequence[Any]]:
    functions = {function.func for expr in exprs for function in expr.atoms(sympy.Function)}
    known = {function.__name__: functools.partial(_apply, function) for function in functions}
    evaluate: Callable[..., Sequence[Any]] = sympy.lambdify(symbols, list(exprs), modules=[known, "math"])
    return evaluate


def _apply(function: Callable[..., sympy.Expr], *args: float) -> float:
    """A function of sizes that Python has no name for (CeilToInt, FloorDiv, ...), by its own rule."""
    value = function(*(sympy.sympify(arg) for arg in args))
    return int(value) if value.is_integer else float(value)


def _undominated(exprs: set[sympy.Expr]) -> list[sympy.Expr]:
    """Drop polynomials that another one bounds coefficient by coefficient (symbols are positive)."""
    kept: list[sympy.Expr] = []
    for one in sorted(exprs, key=lambda expr: -len(sympy.Add.make_args(expr))):
        if not any(_bounds(other, one) for other in kept):
            kept = [other for other in kept if not _bounds(one, other)] + [one]
    return kept


def _bounds(larger: sympy.Expr, smaller: sympy.Expr) -> bool:
    gap = sympy.expand(larger - smaller)
    return all(term.as_coeff_Mul()[0] >= 0 for term in sympy.Add.make_args(gap))
