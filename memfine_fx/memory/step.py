"""The memory of one training step: graphs with their chunked regions, and what is there before the step begins.

    peak of a step = static + the largest of
        forward of graph i    what earlier graphs saved + live bytes of its forward + working set of a region
        backward of graph i   what earlier graphs saved + live bytes of its backward + working set of a region

Static bytes are the parameters and buffers that the graphs read, gradients that exist, and optimizer state. New
gradients are results of the backward graphs and counted there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from memfine_fx.compat.shapes import hints_of_symbols
from memfine_fx.compat.tensors import tree_leaves
from memfine_fx.config import Axis
from memfine_fx.memory.head_bytes import HeadMemory
from memfine_fx.memory.liveness import Call, GraphMemory, Peak
from memfine_fx.memory.region_bytes import ChunkSize, RegionBytes, region_workspace, workspace_expression
from memfine_fx.records import Keep

__all__ = ["GraphStep", "RegionMemory", "StepPeak", "peak_expression", "step_peak", "value_at"]

SizeOf = Callable[[str, int], ChunkSize]
"""(site, T) -> how large chunks are; the rows of a head's are tokens."""


def value_at(expr: sympy.Expr, sizes: Mapping[str, int]) -> int:
    """An expression's value (tokens, bytes) at given sizes."""
    return _value(expr, frozenset((symbol, sizes[str(symbol)]) for symbol in expr.free_symbols))


@functools.lru_cache(maxsize=1024)
def _value(expr: sympy.Expr, values: frozenset[tuple[sympy.Symbol, int]]) -> int:
    return int(expr.subs(dict(values)))


@dataclass(frozen=True)
class RegionMemory:
    """A region's byte terms by what it keeps, and T in the graph's symbols.

    The terms are asked for again each time: bodies know theirs exactly once they are compiled.
    """

    terms: Callable[[Keep], RegionBytes]
    num_tokens: sympy.Expr
    axis: Axis

    def tokens_at(self, sizes: Mapping[str, int]) -> int:
        return value_at(self.num_tokens, sizes)

    def workspace(self, call: Call, sizes: Mapping[str, int], size_of: Callable[[int], ChunkSize]) -> int:
        """Bytes of the region's op beyond what the graph shows; `size_of` gives chunks for T tokens."""
        if call.phase != "forward" and call.phase != "backward":
            return 0
        num_tokens = self.tokens_at(sizes)
        return region_workspace(self.terms(call.keep), num_tokens, size_of(num_tokens), self.axis, call.phase)


@dataclass
class GraphStep:
    """One captured graph's forward and backward, and its regions by site.

    Args:
        regions: site -> its memory.
        heads: the same for heads.
        sizes: value of each symbol in the latest call.
        forward, backward: estimated when the graph is partitioned, read from the compiled code once that exists.
        decision: what the partitioner chose, in words; "" where it had nothing to decide.
        gradient_bytes: gradients that were there when the latest call began.
    """

    regions: dict[str, RegionMemory] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    forward: GraphMemory | None = None
    backward: GraphMemory | None = None
    decision: str = ""
    gradient_bytes: int = 0
    heads: dict[str, HeadMemory] = field(default_factory=dict)

    def note_gradients(self, inputs: Sequence[object]) -> bool:
        """Count the gradients of a call's parameters; whether that differs from the call before.

        One parameter tells whether there are gradients; all are asked only when that changes.
        """
        trained = (one for one in inputs if isinstance(one, torch.nn.Parameter) and one.requires_grad)
        first = next(trained, None)
        if first is None or (first.grad is not None) == (self.gradient_bytes > 0):
            return False
        gradients = [one.grad for one in (first, *trained) if one.grad is not None]
        self.gradient_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
        return True

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

    def keep_of(self, site: str) -> Keep:
        """What a region keeps in the graphs as they are now."""
        calls = self.forward.calls if self.forward is not None else ()
        return next((call.keep for call in calls if call.site == site and call.phase == "forward"), "nothing")

    def workspace(self, size_of: SizeOf, sizes: Mapping[str, int]) -> Callable[[Call], int]:
        def of_call(call: Call) -> int:
            region, head = self.regions.get(call.site), self.heads.get(call.site)
            if head is not None:
                num_tokens = value_at(head.num_tokens, sizes)
                return head.workspace(min(num_tokens, size_of(call.site, num_tokens).rows))
            if region is None:
                return 0
            return region.workspace(call, sizes, functools.partial(size_of, call.site))

        return of_call

    def left_bytes(self) -> int:
        """What its forward saves for its backward, at the latest sizes."""
        if self.forward is None:
            return 0
        return value_at(self.forward.left_bytes, self.sizes)


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


def step_peak(graphs: Iterable[GraphStep], size_of: SizeOf) -> StepPeak | None:
    """The peak over all graphs of a step that runs each once; None where nothing is known yet."""
    saved = 0
    best: StepPeak | None = None
    known = [graph for graph in graphs if graph.forward is not None]
    for number, graph in enumerate(known):
        workspace = graph.workspace(size_of, graph.sizes)
        for where, memory in (("forward", graph.forward), ("backward", graph.backward)):
            if memory is None:
                continue
            peak = memory.peak(graph.sizes, workspace)
            if best is None or saved + peak.num_bytes > best.num_bytes:
                best = _of_graph(peak, saved, where if len(known) == 1 else f"{where} of graph {number}")
        saved += graph.left_bytes()
    return best


def _of_graph(peak: Peak, saved: int, where: str) -> StepPeak:
    earlier = (("saved by earlier graphs", saved),) if saved else ()
    return StepPeak(saved + peak.num_bytes, where, (*earlier, *peak.terms))


def peak_expression(graphs: Iterable[GraphStep], size_of: SizeOf) -> sympy.Expr:
    """The step's peak beyond what is there before it, in the graphs' symbols; R as at the latest sizes.

    `expr.subs({"s27": 4096, ...})` answers for another batch without compiling anything.
    """
    saved: sympy.Expr = sympy.Integer(0)
    peaks: list[sympy.Expr] = []
    for graph in graphs:
        workspace = functools.partial(_workspace_expression, graph, size_of)
        peaks += [saved + memory.peak_expression(workspace) for memory in (graph.forward, graph.backward) if memory]
        saved += graph.forward.left_bytes if graph.forward else sympy.Integer(0)
    return sympy.Max(*peaks) if peaks else sympy.Integer(0)


def _workspace_expression(graph: GraphStep, size_of: SizeOf, call: Call) -> sympy.Expr | int:
    region, head = graph.regions.get(call.site), graph.heads.get(call.site)
    if head is not None:
        return head.workspace(size_of(call.site, value_at(head.num_tokens, graph.sizes)).rows)
    if region is None or (call.phase != "forward" and call.phase != "backward"):
        return 0
    size = size_of(call.site, region.tokens_at(graph.sizes))
    return workspace_expression(region.terms(call.keep), region.num_tokens, size, region.axis, call.phase)
