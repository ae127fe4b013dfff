"""The memory of one compiled graph over its run: symbolic allocations and calls, and their peak at given sizes.

Terms
    position      a statement of the compiled wrapper, counted from 0
    allocation    bytes alive from one position up to, not including, another; None: past the end
    call          a chunked region that runs at a position, with a working set the graph does not show; or a mark, which
                  has none: a product of matrices, in the record of a graph without regions
    live bytes    at a position: the allocations alive there, and the working set of a call there
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, cast

import sympy

from memfine_fx.records import SavePolicy

__all__ = [
    "OP_PHASES",
    "Allocation",
    "Call",
    "CountedInputs",
    "GraphMemory",
    "Peak",
    "Phase",
    "SavedRowCounts",
    "Workspace",
    "call_of",
]

Phase = Literal["route", "forward", "backward", "head", "mark"]

OP_PHASES: dict[str, Phase] = {
    "route": "route",
    "route_shared": "route",
    "experts": "forward",
    "experts_saving": "forward",
    "experts_backward": "backward",
    "experts_backward_saved": "backward",
    "head_loss": "head",
}
"""Our operations, without their namespace."""


@dataclass(frozen=True)
class Allocation:
    """A storage that is alive during a part of a graph's run.

    Args:
        name: of the node, buffer or scratch memory that it is.
        num_bytes: its size, in the graph's symbols.
        start, stop: the positions between which it lives.
        is_input: whether it exists before the run.
        saved_by: id of the region that saves it for backward, one row for each routed row; "" if none does.
        result_of: id of the region whose backward returns it, and its index among the results.
        origin: the node or function that made it, or its fused kernel, as the code names them; "" where that is `name`.
        label: what it is, in words, for reports; "" where nobody has said so.
    """

    name: str
    num_bytes: sympy.Expr
    start: int
    stop: int | None
    is_input: bool = False
    saved_by: str = ""
    result_of: tuple[str, int] | None = None
    origin: str = field(default="", compare=False)
    label: str = field(default="", compare=False)


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
    """A chunked region's op at a position; `region_id` is the key of its live region, "" for routing.

    `policy` is what the graph has room to save, and `num_saved_rows` of how many routed rows it is saved; None: of all.
    """

    position: int
    region_id: str
    phase: Phase
    policy: SavePolicy = "nothing"
    num_saved_rows: int | None = None


def call_of(position: int, phase: Phase, texts: Sequence[str]) -> Call:
    """Return the call of an op with these text arguments: its region id, and what it saves where it has a choice."""
    region_id, policy, *_ = (*texts, "", "")
    return Call(position, region_id, phase, cast("SavePolicy", policy or "nothing"))


SavedRowCounts = frozenset[tuple[str, int, int]]
"""(region id, rows of which it saves something in a run, routed rows) of regions that have room for all of them."""
Workspace = Callable[[Call], int]
"""Bytes that a call of a region needs beyond what the graph shows."""
_MOST_SIZES = 8
"""Combinations of sizes at which a record caches live bytes: batches of a few lengths, with and without gradients."""


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

    @functools.cached_property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """Sizes that are not known before the run (batch, sequence), by name."""
        by_name = {str(symbol): symbol for size in self._distinct for symbol in size.free_symbols}  # once each, by name
        return tuple(by_name[name] for name in sorted(by_name))

    @functools.cached_property
    def _distinct(self) -> tuple[sympy.Expr, ...]:
        """Each size once: equal layers repeat theirs."""
        return tuple(dict.fromkeys(allocation.num_bytes for allocation in self.allocations))

    @functools.cached_property
    def _resting_at(self) -> dict[tuple[int, ...], Sequence[int]]:
        """Values of the symbols -> live bytes without any call's working set, of the latest sizes that were asked."""
        return {}

    def without(self, names: Collection[str]) -> GraphMemory:
        """The record without the storages of these names, with regions that save nothing."""
        allocations = tuple(allocation for allocation in self.allocations if allocation.name not in names)
        return replace(
            self, allocations=allocations, calls=tuple(replace(call, policy="nothing") for call in self.calls)
        )

    def of_run(
        self,
        saved: SavedRowCounts,
        added: frozenset[tuple[str, int]] = frozenset(),
        sizes: Mapping[str, int] | None = None,
    ) -> GraphMemory:
        """Return the record of a run that allocates less than its graph has room for.

        Args:
            saved: of how many rows regions save something in it; those that are not named, of all.
            added: results of regions' backwards that are added in place to existing gradients.
            sizes: value of each symbol, by name, where a region saves something of a part of its rows.
        """
        if not saved and not added:
            return self
        if (saved, added) not in self._of_runs:
            if len(self._of_runs) >= _MOST_SIZES:
                self._of_runs.clear()
            self._of_runs[saved, added] = self._made_in_run(saved, added, sizes or {})
        return self._of_runs[saved, added]

    def _made_in_run(
        self, saved: SavedRowCounts, added: frozenset[tuple[str, int]], sizes: Mapping[str, int]
    ) -> GraphMemory:
        rows = {region_id: (num_saved, num_rows) for region_id, num_saved, num_rows in saved}
        has_parts = any(num_saved for num_saved, _ in rows.values())
        all_bytes = self.bytes_at(sizes) if has_parts else [0] * len(self.allocations)
        allocations = [
            _of_rows(allocation, num_bytes, *rows.get(allocation.saved_by, (1, 1)))
            for allocation, num_bytes in zip(self.allocations, all_bytes, strict=True)
            if allocation.result_of not in added and rows.get(allocation.saved_by, (1, 1))[0]
        ]
        calls = (
            replace(call, num_saved_rows=rows[call.region_id][0]) if call.region_id in rows else call
            for call in self.calls
        )
        return replace(self, allocations=tuple(allocations), calls=tuple(calls))

    @functools.cached_property
    def _of_runs(self) -> dict[tuple[SavedRowCounts, frozenset[tuple[str, int]]], GraphMemory]:
        return {}

    def live_bytes(self, sizes: Mapping[str, int], workspace: Workspace) -> list[int]:
        """Live bytes at each position.

        Args:
            sizes: value of each symbol, by name.
            workspace: bytes that a call of a region needs beyond what the graph shows.
        """
        live = list(self.resting_bytes(sizes))
        for call in self.calls:
            live[call.position] += workspace(call)
        return live

    def resting_bytes(self, sizes: Mapping[str, int]) -> Sequence[int]:
        """Live bytes at each position without any call's working set: what no choice of rows changes."""
        key = self._values_of(sizes)
        if key not in self._resting_at:
            if len(self._resting_at) >= _MOST_SIZES:
                self._resting_at.clear()
            self._resting_at[key] = self._resting(sizes)
        return self._resting_at[key]

    def _resting(self, sizes: Mapping[str, int]) -> Sequence[int]:
        changes = [0] * (self.num_positions + 1)
        for allocation, num_bytes in zip(self.allocations, self.bytes_at(sizes), strict=True):
            changes[allocation.start] += num_bytes
            if allocation.stop is not None:
                changes[allocation.stop] -= num_bytes
        return list(accumulate(changes[: self.num_positions]))

    def peak_bytes(self, sizes: Mapping[str, int], workspace: Workspace) -> int:
        """The bytes of `peak` alone, which planning asks for often: the calls are added to what is known at `sizes`."""
        resting = self.resting_bytes(sizes)
        working: dict[int, int] = {}
        for call in self.calls:
            working[call.position] = working.get(call.position, 0) + workspace(call)
        during = (resting[position] + num_bytes for position, num_bytes in working.items())
        return max((0, *resting, *during))

    def peak(self, sizes: Mapping[str, int], workspace: Workspace, *, num_terms: int = 8) -> Peak:
        """The peak at given sizes, with its largest terms."""
        live = self.live_bytes(sizes, workspace)
        if not live:
            return Peak(0, 0, ())
        position = max(range(len(live)), key=live.__getitem__)
        terms = []
        of_labels: dict[str, int] = {}  # equal words are one term
        for allocation, num_bytes in zip(self.allocations, self.bytes_at(sizes), strict=True):
            if allocation.start <= position and (allocation.stop is None or position < allocation.stop):
                if allocation.label:
                    of_labels[allocation.label] = of_labels.get(allocation.label, 0) + num_bytes
                else:
                    terms.append((allocation.name, num_bytes))
        terms += of_labels.items()
        terms += [(f"working set of {call.phase}", workspace(call)) for call in self.calls if call.position == position]
        terms.sort(key=lambda term: -term[1])
        return Peak(live[position], position, tuple(terms[:num_terms]))

    def peak_expression(self, workspace: Callable[[Call], sympy.Expr | int]) -> sympy.Expr:
        """The peak as one expression in the graph's symbols.

        Args:
            workspace: working set of a call, as an expression.
        """
        changes: list[sympy.Expr] = [sympy.Integer(0)] * (self.num_positions + 1)
        for allocation in self.allocations:
            changes[allocation.start] += allocation.num_bytes
            if allocation.stop is not None:
                changes[allocation.stop] -= allocation.num_bytes
        calls = {call.position: workspace(call) for call in self.calls}
        total: sympy.Expr = sympy.Integer(0)
        peaks: set[sympy.Expr] = set()
        for position, change in enumerate(changes[: self.num_positions]):
            total = sympy.expand(total + change)
            peaks.add(total + calls.get(position, sympy.Integer(0)))
        return sympy.Max(*_undominated(peaks)) if peaks else sympy.Integer(0)

    @functools.cached_property
    def left_bytes(self) -> sympy.Expr:
        """Bytes that outlive the run: results, and what a forward saves for its backward."""
        outliving = (allocation.num_bytes for allocation in self.allocations if allocation.stop is None)
        return sum(outliving, sympy.Integer(0))

    def bytes_at(self, sizes: Mapping[str, int]) -> Sequence[int]:
        """Bytes of each allocation, in order."""
        values: Sequence[Any] = self._distinct
        if self.symbols:
            values = _evaluator(self.symbols, self._distinct)(*self._values_of(sizes))
        num_bytes = dict(zip(self._distinct, map(int, values), strict=True))
        return [num_bytes[allocation.num_bytes] for allocation in self.allocations]

    def _values_of(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        missing = [str(symbol) for symbol in self.symbols if str(symbol) not in sizes]
        if missing:
            names = [str(symbol) for symbol in self.symbols]
            raise KeyError(f"no value for {missing[0]}; sizes are needed for {names}")
        return tuple(sizes[str(symbol)] for symbol in self.symbols)


def _of_rows(one: Allocation, num_bytes: int, num_saved: int, num_rows: int) -> Allocation:
    """An allocation of `num_bytes` for a part of the rows that it has room for."""
    if num_saved == num_rows:
        return one
    return replace(one, num_bytes=sympy.Integer(num_bytes // num_rows * num_saved))


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
    remaining: list[sympy.Expr] = []
    for candidate in sorted(exprs, key=lambda expr: -len(sympy.Add.make_args(expr))):
        if not any(_bounds(other, candidate) for other in remaining):
            remaining = [other for other in remaining if not _bounds(candidate, other)] + [candidate]
    return remaining


def _bounds(larger: sympy.Expr, smaller: sympy.Expr) -> bool:
    gap = sympy.expand(larger - smaller)
    return all(term.as_coeff_Mul()[0] >= 0 for term in sympy.Add.make_args(gap))
