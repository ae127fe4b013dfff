"""A session: everything one `optimize` (or one `torch.compile(backend="memfine")`) has compiled so far."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memfine_fx.compiler.captured_graph import CapturedGraph, LoweredHead, LoweredRegion
from memfine_fx.compiler.diagnostics import Diagnostics
from memfine_fx.config import Config
from memfine_fx.plan.step_state import StepState
from memfine_fx.records import MoERegion, Refusal
from memfine_fx.report.picture import RegionGraph
from memfine_fx.report.roles import region_graph

__all__ = ["DryRun", "Observer", "Session", "next_region_id"]


class Observer:
    """Watches the compilation of a session's graphs. This one sees to it that they are compiled as ever.

    Args:
        runs_here: whether rates that are measured on this machine decide.
    """

    compiles = True
    """Whether graphs are compiled and run for the user; else nothing is compared, logged or warned of."""
    lowers = True
    """Whether regions are rewritten."""

    def __init__(self, *, runs_here: bool = True) -> None:
        self.runs_here = runs_here

    def on_capture(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], session: Session, record: CapturedGraph
    ) -> Callable[..., Any] | None:
        """Return what runs in place of a captured graph in which nothing is looked for; None to look for regions."""
        return None

    def on_lowered(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], session: Session, record: CapturedGraph
    ) -> Callable[..., Any] | None:
        """Return what runs in place of a rewritten graph; None to compile it."""
        return None

    def picture_of(self, region: MoERegion) -> RegionGraph | None:
        """Return the picture of a region that goes into reports, None where none does."""
        return None


class DryRun(Observer):
    """Runs graphs as they were captured: for `explain` and `verify`, which analyse only."""

    compiles = False
    lowers = False

    def on_lowered(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], session: Session, record: CapturedGraph
    ) -> Callable[..., Any] | None:
        return graph_module

    def picture_of(self, region: MoERegion) -> RegionGraph | None:
        return region_graph(region)


@dataclass(eq=False)
class Session:
    """Regions and refusals of one compilation unit, newest graph last.

    Args:
        config: its options.
        mode: of `torch.compile`, None where it was not given.
        holds_compiled: whether what it compiled lives no longer than itself: Dynamo never lets go of code that it
            compiled for a model, so what it is given holds nothing.
        observer: what watches its graphs, and what they become.
        replays_routing: whether its graphs take the ids of experts from `replay_routing`.
        capture_flags: Dynamo flags switched on for this attempt; what they let into a graph must end in regions.
        diagnostics: notes, warnings and seconds.
        steps: runs of its graphs, and the bytes that exist before a step.
        models: that it compiles, as far as they are known.
    """

    config: Config
    mode: str | None = None
    holds_compiled: bool = False
    observer: Observer = field(default_factory=Observer)
    replays_routing: bool = False
    capture_flags: tuple[str, ...] = ()
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    graphs: list[CapturedGraph] = field(default_factory=list)
    steps: StepState = field(init=False)
    models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    _compiled: list[Callable[..., Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = StepState(self.config, self.graphs, self.diagnostics.timed, self.observer.runs_here)

    @property
    def has_chunked(self) -> bool:
        """Whether any region was lowered so far."""
        return any(isinstance(outcome, LoweredRegion) for outcome in self.outcomes)

    @property
    def outcomes(self) -> list[LoweredRegion | Refusal]:
        return [outcome for graph in self.graphs for outcome in graph.outcomes]

    @property
    def lowered(self) -> list[LoweredRegion]:
        """Return the chunked regions of all graphs."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, LoweredRegion)]

    @property
    def lowered_heads(self) -> list[LoweredHead]:
        """Return the chunked heads of all graphs."""
        return [head for graph in self.graphs for head in graph.heads if isinstance(head, LoweredHead)]

    def start_attempt(self, capture_flags: tuple[str, ...]) -> None:
        """Forget the graphs of an abandoned attempt and begin one under these flags."""
        self.capture_flags = capture_flags
        self.graphs.clear()
        self._compiled.clear()
        self.steps.forget_bytes()
        self.forget_plans()

    def add_graph(self, inputs: Sequence[object]) -> CapturedGraph:
        """Open the record of one captured graph with these inputs, parameters among them."""
        graph = CapturedGraph()
        self.hold_graph(graph, inputs)
        return graph

    def hold_graph(self, graph: CapturedGraph, inputs: Sequence[object]) -> None:
        """Hold a graph's record for as long as its parameters live."""
        myself = weakref.ref(self)

        def forget_if_dead() -> None:
            session = myself()
            if session is not None and not graph.alive_parameters():
                session.drop_graph(graph)

        if graph.note_inputs(inputs, forget_if_dead):
            if graph not in self.graphs:
                self.graphs.append(graph)
            self.steps.note_parameters()
            self.forget_plans()

    def drop_graph(self, graph: CapturedGraph) -> None:
        """Forget a graph whose compilation was given up."""
        if graph in self.graphs:
            self.graphs.remove(graph)
        self.steps.history.forget(graph)
        self.steps.forget_bytes()
        self.forget_plans()

    def hold_compiled(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable that Dynamo stores for a compiled graph; it does not keep an optimized model alive."""
        if not self.holds_compiled:
            return compiled
        self._compiled.append(compiled)
        reference = weakref.ref(compiled)

        def call(*args: Any) -> Any:
            living = reference()
            assert living is not None, "code of an optimized model runs for that model only"
            return living(*args)

        return call

    def note_step(self, *, is_first: bool) -> None:
        """Note that an optimizer of its parameters stepped. The first time, the bytes before a step change."""
        self.steps.note_optimizer_step(is_first=is_first)
        if is_first:
            self.forget_plans()

    def forget_plans(self) -> None:
        """Let every region plan again at its next call, because more is known of the step."""
        self.steps.peaks.forget()
        for graph in self.graphs:
            for lowered in graph.lowered:
                lowered.live.forget_plans()

    def restricted_to(self, parameters: Iterable[torch.Tensor]) -> Session | None:
        """The session with only the graphs that hold one of these parameters; None if there is none."""
        wanted = frozenset(id(parameter) for parameter in parameters)
        graphs = [graph for graph in self.graphs if any(id(alive) in wanted for alive in graph.alive_parameters())]
        if not graphs:
            return None
        part = copy.copy(self)
        part.graphs, part.steps = graphs, self.steps.restricted_to(graphs, wanted)
        part.models = weakref.WeakSet(
            model for model in self.models if any(id(parameter) in wanted for parameter in model.parameters())
        )
        return part

    def without_regions(self, model: torch.nn.Module | None) -> Session | None:
        """Return the part of the session that belongs to a model if nothing in it was chunked; None in later calls.

        Args:
            model: the one that runs, None where that is not known: then the whole session counts.
        """
        part = None if model is None else self.restricted_to(model.parameters())
        if part is None:
            part, model = self, None
        return part if not part.has_chunked and self.diagnostics.is_first_warning(model) else None


_region_numbers = itertools.count()


def next_region_id(body_key: str) -> str:
    """Return the id of a newly lowered region or head: the content hash of its body and a running number."""
    return f"{body_key}/{next(_region_numbers)}"
