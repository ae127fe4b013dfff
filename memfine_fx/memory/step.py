"""The memory of one training step: graphs with their chunked regions, and what is there before the step begins.

Terms
    run           one call of a graph, with the values of its symbols
    saved bytes   what runs have saved for backwards that are still to come
    peak          static + the largest of, for each run of the step,
        its forward     saved bytes then + live bytes of its forward + working set of a region
        its backward    the same saved bytes, and gradients that backwards of later runs have made
                        + live bytes of its backward + working set of a region

Static bytes are the parameters and buffers that the graphs read, gradients that exist, and optimizer state. New
gradients are results of the backward graphs: counted there, and in the backwards that come after.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import sympy
import torch
from torch import fx

from memfine_fx.compat.shapes import hints_of_symbols
from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.config import Axis
from memfine_fx.memory.head_bytes import HeadMemory
from memfine_fx.memory.liveness import Call, GraphMemory, SavedRowCounts
from memfine_fx.memory.region_bytes import ChunkSize, RegionBytes, region_workspace, workspace_expression
from memfine_fx.memory.sizes import larger
from memfine_fx.records import SavePolicy, SavingOp

__all__ = [
    "GraphStep",
    "RegionMemory",
    "RunMemory",
    "StepPeak",
    "peak_expression",
    "step_peak",
    "step_peak_bytes",
    "value_at",
]

Direction = Literal["forward", "backward"]
SizeOf = Callable[[str, int], ChunkSize]
"""(region id, T) -> how large chunks are; the rows of a head's are tokens."""


def value_at(expr: sympy.Expr, sizes: Mapping[str, int]) -> int:
    """An expression's value (tokens, bytes) at given sizes."""
    return _value(expr, frozenset((symbol, sizes[str(symbol)]) for symbol in expr.free_symbols))


@functools.lru_cache(maxsize=1024)
def _value(expr: sympy.Expr, values: frozenset[tuple[sympy.Symbol, int]]) -> int:
    return int(expr.subs(dict(values)))


def _never_changes() -> int:
    return 0


@dataclass(frozen=True)
class RegionMemory:
    """A region's byte terms by what it saves, and T in the graph's symbols.

    Args:
        terms: returns them; called again when `revision` changes, since compiled functions know their peaks exactly
            once they are compiled.
        num_tokens: T.
        axis: which way the region is chunked.
        revision: a number that changes with the terms.
    """

    terms: Callable[[SavePolicy], RegionBytes]
    num_tokens: sympy.Expr
    axis: Axis
    revision: Callable[[], int] = _never_changes
    _known: dict[SavePolicy, tuple[int, RegionBytes]] = field(default_factory=dict, compare=False)

    def terms_now(self, policy: SavePolicy) -> RegionBytes:
        """Return the terms as far as they are known now, computed once for each revision."""
        revision = self.revision()
        if policy not in self._known or self._known[policy][0] != revision:
            self._known[policy] = revision, self.terms(policy)
        return self._known[policy][1]

    def tokens_at(self, sizes: Mapping[str, int]) -> int:
        return value_at(self.num_tokens, sizes)

    def rows_at(self, sizes: Mapping[str, int]) -> int:
        """Return N, the number of routed rows, at given sizes."""
        return self.tokens_at(sizes) * self.terms_now("nothing").top_k

    def workspace(self, call: Call, sizes: Mapping[str, int], size_of: Callable[[int], ChunkSize]) -> int:
        """Bytes of the region's op beyond what the graph shows; `size_of` gives chunks for T tokens."""
        if call.phase != "forward" and call.phase != "backward":
            return 0
        phase, num_tokens = call.phase, self.tokens_at(sizes)
        size = size_of(num_tokens)
        return max(
            region_workspace(self.terms_now(policy), num_tokens, size.at_most(most), self.axis, phase)
            for policy, most in self.parts(call, sizes)
        )

    def parts(self, call: Call, sizes: Mapping[str, int]) -> list[tuple[SavePolicy, int | None]]:
        """Return what each kind of chunk in a call saves, and the most rows of such a chunk; None for the rows where
        all chunks are of that kind.
        """
        if call.num_saved_rows is None or call.policy == "nothing":
            return [(call.policy, None)]
        others = self.rows_at(sizes) - call.num_saved_rows
        if not call.num_saved_rows or others <= 0:
            return [(call.policy if call.num_saved_rows else "nothing", None)]
        return [(call.policy, call.num_saved_rows), ("nothing", others)]


@dataclass(frozen=True)
class _KnownTerms:
    """The byte terms of a region by what it saves, in the place of the bodies that they were read from."""

    terms: Mapping[SavePolicy, RegionBytes]

    def __call__(self, policy: SavePolicy) -> RegionBytes:
        return self.terms[policy]


@dataclass
class GraphStep:
    """One partition of a captured graph into forward and backward, and the graph's regions by region id.

    Args:
        regions: region id -> its memory.
        heads: the same for heads.
        sizes: value of each symbol in the call that it was partitioned for.
        forward, backward: estimated when the graph is partitioned, read from the compiled code once that exists.
        decision: what the partitioner chose, in words; "" where it had nothing to decide.
        saves_all: whether it recomputes nothing costly and regions save all that pays.
        is_least: whether it is the partition for budgets that no other fits: nothing smaller can be made.
        base: the partition of `passes.step.fit` that it is or was derived from: "save_all", "recompute_pointwise" or
            "recompute_all"; "" without a budget.
        optional: seconds spared per byte by regions that save as many rows as a run has room for (`plan.problem`).
        estimated: directions whose record is an estimate although exact ones come from compiled code.
        fusible_gradients: (region id, place) of results of regions' backwards that are the whole gradient of an input
            -> place of that input (`passes.step.fusible_gradients`).
        chosen_by: the fewest bytes that a run would take, by the estimate that it was chosen by under a budget.
        donated: positions of saved tensors that its compiled backward may write over.
        saving: its backward ops that read what a region saved.
        modules: the forward and the backward graph, of what a partitioner has just made; else ().
    """

    regions: dict[str, RegionMemory] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    forward: GraphMemory | None = None
    backward: GraphMemory | None = None
    decision: str = ""
    saves_all: bool = False
    is_least: bool = False
    heads: dict[str, HeadMemory] = field(default_factory=dict)
    optional: dict[str, float] = field(default_factory=dict)
    estimated: set[Direction] = field(default_factory=set)
    fusible_gradients: Mapping[tuple[str, int], int] = field(default_factory=dict)
    base: str = ""
    chosen_by: int = 0
    donated: tuple[int, ...] = ()
    saving: tuple[SavingOp, ...] = ()
    modules: tuple[fx.GraphModule, ...] = ()

    def without_compiled_experts(self) -> GraphStep:
        """Return a copy that can be pickled: of regions it has the byte terms of what they save, and no bodies."""
        memories = [memory for memory in (self.forward, self.backward) if memory is not None]
        regions = {}
        for region_id, region in self.regions.items():
            calls = (call for memory in memories for call in memory.calls if call.region_id == region_id)
            policies: set[SavePolicy] = {"nothing", *(call.policy for call in calls)}
            terms = {policy: region.terms_now(policy) for policy in sorted(policies)}
            regions[region_id] = RegionMemory(_KnownTerms(terms), region.num_tokens, region.axis)
        return replace(self, regions=regions)

    def learned(self) -> GraphStep:
        """Return a copy of what compilation found out, without the regions, which every process analyses anew: a cache
        stores it for the process that loads the graph from it.
        """
        sizes, optional, estimated = dict(self.sizes), dict(self.optional), set(self.estimated)
        return replace(self, regions={}, heads={}, sizes=sizes, optional=optional, estimated=estimated)

    def take(self, record: GraphStep) -> None:
        """Set what a partitioner, or another process that compiled the same graph, found out."""
        for own in fields(self):
            if own.name not in ("regions", "heads", "sizes", "modules"):
                setattr(self, own.name, copy.copy(getattr(record, own.name)))
        for name, hint in record.sizes.items():
            self.sizes.setdefault(name, hint)

    def add_hints(self, graph: fx.Graph) -> None:
        """Values for symbols that no input's size is (a saved random state's length), as in the captured call."""
        for node in graph.nodes:
            for value in tree_leaves(node.meta.get("val")):
                sizes: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else (value,)
                for size in sizes:
                    if isinstance(size, torch.SymInt):
                        self._add_hints_of(size)

    def _add_hints_of(self, size: torch.SymInt) -> None:
        known = hints_of_symbols(size)
        for symbol in size.node.expr.free_symbols:
            self.sizes.setdefault(str(symbol), int(known.get(symbol, 1)))

    def policy_of(self, region_id: str) -> SavePolicy:
        """Return what a region saves in the graphs as they are now."""
        calls = self.forward.calls if self.forward is not None else ()
        return next(
            (call.policy for call in calls if call.region_id == region_id and call.phase == "forward"), "nothing"
        )

    def workspace(self, size_of: SizeOf, sizes: Mapping[str, int]) -> Callable[[Call], int]:
        def of_call(call: Call) -> int:
            region, head = self.regions.get(call.region_id), self.heads.get(call.region_id)
            if head is not None:
                num_tokens = value_at(head.num_tokens, sizes)
                return head.workspace(min(num_tokens, size_of(call.region_id, num_tokens).rows))
            if region is None:
                return 0
            return region.workspace(call, sizes, functools.partial(size_of, call.region_id))

        return of_call


@dataclass(frozen=True)
class RunMemory:
    """One run of a graph in a step.

    Args:
        step: its graph's record.
        sizes: value of each of its inputs' symbols in this run.
        saved_bytes: by earlier runs whose backwards are still to come, when this one begins.
        later_gradient_bytes: new gradients that backwards of later runs have made when its own backward begins.
        saved: rows that regions save in this run, where it is not all that the graph has room for.
        added: those of `GraphStep.fusible_gradients` that it adds in place to existing gradients, so that they are not
            allocated.
        available_bytes: bytes that the run may use beyond what exists before it; None without a limit.
    """

    step: GraphStep
    sizes: Mapping[str, int]
    saved_bytes: int = 0
    later_gradient_bytes: int = 0
    saved: SavedRowCounts = frozenset()
    added: frozenset[tuple[str, int]] = frozenset()
    available_bytes: int | None = None

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal where the plans of runs are equal, as long as their graphs' byte terms are."""
        beside = (self.saved_bytes, self.later_gradient_bytes, self.available_bytes, self.saved, self.added)
        return (id(self.step), *sorted(self.sizes.items()), *beside)

    @property
    def forward(self) -> GraphMemory | None:
        """Return the memory record of its forward, with the rows that this run saves; None where it is unknown."""
        return None if self.step.forward is None else self.step.forward.of_run(self.saved, sizes=self.values)

    @property
    def backward(self) -> GraphMemory | None:
        """Return the memory record of its backward, with the rows that this run saves; None where it is unknown."""
        return None if self.step.backward is None else self.step.backward.of_run(self.saved, self.added, self.values)

    def with_saved_rows(self, rows: Mapping[str, int]) -> RunMemory:
        """Return the run in which regions that may save part of their rows save so many; regions not named, none."""
        saved_rows = {region_id: (rows.get(region_id, 0), self.rows_of(region_id)) for region_id in self.step.optional}
        return replace(
            self,
            saved=frozenset((region_id, *counts) for region_id, counts in saved_rows.items() if counts[0] < counts[1]),
        )

    def rows_of(self, region_id: str) -> int:
        """Return N of a region, the number of its routed rows."""
        return self.step.regions[region_id].rows_at(self.values)

    def num_saved_rows(self, region_id: str) -> int:
        """Return the number of rows of which a region saves something in this run."""
        if self.step.policy_of(region_id) == "nothing":
            return 0
        return next(
            (num_saved for other_id, num_saved, _ in self.saved if other_id == region_id), self.rows_of(region_id)
        )

    @property
    def values(self) -> dict[str, int]:
        """Return the values of all symbols; those that only results inside the graph have (a random state's length)
        stay as captured.
        """
        return {**self.step.sizes, **self.sizes}

    @property
    def left_bytes(self) -> int:
        """Return the bytes that outlive its forward: results, and what it saves for its backward; 0 where its record is
        unknown.
        """
        return 0 if self.forward is None else value_at(self.forward.left_bytes, self.values)


@dataclass(frozen=True)
class StepPeak:
    """The predicted peak of a step beyond what is there before it.

    Args:
        num_bytes: live bytes at the peak.
        where: "forward" or "backward", and of which graph if there are several.
        terms: (name, bytes), largest first.
    """

    num_bytes: int
    where: str
    terms: tuple[tuple[str, int], ...]


def step_peak(runs: Iterable[RunMemory], size_of: SizeOf) -> StepPeak | None:
    """The peak over all runs of a step; None where nothing is known yet."""
    best: StepPeak | None = None
    known = [run for run in runs if run.step.forward is not None]
    for number, run in enumerate(known):
        values = run.values
        workspace = run.step.workspace(size_of, values)
        for where, memory in (("forward", run.forward), ("backward", run.backward)):
            if memory is None:
                continue
            before = _alive_beside(run, where)
            peak = memory.peak(values, workspace)
            num_bytes = peak.num_bytes + sum(term_bytes for _, term_bytes in before)
            if best is None or num_bytes > best.num_bytes:
                place = where if len(known) == 1 else f"{where} of graph {number}"
                best = StepPeak(num_bytes, place, (*before, *peak.terms))
    return best


def step_peak_bytes(runs: Iterable[RunMemory], size_of: SizeOf) -> int | None:
    """The bytes of `step_peak` alone, which planning asks for often."""
    best: int | None = None
    for run in runs:
        values = run.values
        workspace = run.step.workspace(size_of, values)
        for where, memory in (("forward", run.forward), ("backward", run.backward)):
            if memory is None or run.step.forward is None:
                continue
            before = sum(num_bytes for _, num_bytes in _alive_beside(run, where))
            best = max(best or 0, before + memory.peak_bytes(values, workspace))
    return best


def _alive_beside(run: RunMemory, where: str) -> tuple[tuple[str, int], ...]:
    terms = [("saved by earlier graphs", run.saved_bytes)]
    if where == "backward":
        terms.append(("gradients of later graphs", run.later_gradient_bytes))
    return tuple((name, num_bytes) for name, num_bytes in terms if num_bytes)


def peak_expression(runs: Iterable[RunMemory], size_of: SizeOf) -> sympy.Expr:
    """The step's peak beyond what is there before it, in the graphs' symbols; R and bytes of other graphs as they were.

    `expr.subs({"s27": 4096, ...})` answers for another batch without compiling anything.
    """
    peaks: list[sympy.Expr] = []
    for run in runs:
        workspace = functools.partial(_workspace_expression, run, size_of)
        for memory, beside in (
            (run.forward, run.saved_bytes),
            (run.backward, run.saved_bytes + run.later_gradient_bytes),
        ):
            if memory is not None:
                peaks.append(beside + memory.peak_expression(workspace))
    return sympy.Max(*peaks) if peaks else sympy.Integer(0)


def _workspace_expression(run: RunMemory, size_of: SizeOf, call: Call) -> sympy.Expr | int:
    region, head = run.step.regions.get(call.region_id), run.step.heads.get(call.region_id)
    if head is not None:
        return head.workspace(size_of(call.region_id, value_at(head.num_tokens, run.values)).rows)
    if region is None or (call.phase != "forward" and call.phase != "backward"):
        return 0
    size = size_of(call.region_id, region.tokens_at(run.values))
    parts = (
        workspace_expression(region.terms_now(policy), region.num_tokens, size.at_most(most), region.axis, call.phase)
        for policy, most in region.parts(call, run.values)
    )
    return functools.reduce(larger, parts)
