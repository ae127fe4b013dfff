"""A session: everything one `optimize` (or one `torch.compile(backend="memfine")`) has compiled so far."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memfine_fx.compiler.captured_graph import CapturedGraph, LoweredHead, LoweredRegion
from memfine_fx.compiler.observer import Observer
from memfine_fx.config import Config
from memfine_fx.errors import Reason
from memfine_fx.memory.static import foreseen_state_bytes, living_optimizers, static_terms
from memfine_fx.memory.step import RunMemory
from memfine_fx.plan.peaks import SolvedPeaks
from memfine_fx.plan.runs import Caller, MemoryContext, Owner, RunHistory, gradient_bytes, parameters_of
from memfine_fx.records import Refusal, Where

__all__ = ["Session", "next_region_id", "sessions_of_optimizer"]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """Regions and refusals of one compilation unit, newest graph last.

    Args:
        config: its options.
        observer: what watches its graphs, and what they become.
        mode: of `torch.compile`, None where it was not given.
        capture_flags: Dynamo flags switched on for this attempt; what they let into a graph must end in regions.
        notes: what was changed on the model or in Dynamo to capture it, for the report.
        hint: what to do about packed layers that keep experts out of the graphs, for the warning and the report.
        refused_in_attempts: why layers were not chunked that attempts under flags saw, before these were given up.
        holds_compiled: whether what it compiled lives no longer than itself: Dynamo never lets go of code that it
            compiled for a model, so what it is given holds nothing.
        device_limits: see `plan.budget.SessionState`.
        stage_seconds: wall time spent in each stage of the pipeline ("read", "check", "plan", ...).
    """

    config: Config
    mode: str | None = None
    holds_compiled: bool = False
    observer: Observer = field(default_factory=Observer)
    has_warned: bool = False
    has_logged_first_step: bool = False
    has_warned_of_failure: bool = False
    capture_flags: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    hint: str = ""
    refused_in_attempts: list[Refusal] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    _seconds_within: float = 0.0
    _warned_models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    _optimizers: weakref.WeakSet[torch.optim.Optimizer] | None = None
    graphs: list[CapturedGraph] = field(default_factory=list)
    _wanted: frozenset[int] | None = None  # ids of a model's parameters, where it is a part of a session
    _compiled: list[Callable[..., Any]] = field(default_factory=list)
    history: RunHistory = field(default_factory=RunHistory)
    context: MemoryContext | None = None  # of the run whose forward or backward is at work, or was last
    peaks: SolvedPeaks = field(default_factory=SolvedPeaks)
    device_limits: dict[torch.device, int] = field(default_factory=dict)
    _persistent: tuple[frozenset[int], int] | None = None  # ids of members -> bytes, while nothing new is known

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count this time as the stage's, without that of stages within it."""
        started = time.perf_counter()
        before, self._seconds_within = self._seconds_within, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            # Stages nest: seconds that those within have counted are theirs.
            own = spent - self._seconds_within
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + own
            self._seconds_within = before + spent

    @property
    def runs_here(self) -> bool:
        """Return whether rates that are measured on this machine decide."""
        return self.observer.runs_here

    @property
    def has_chunked_last(self) -> bool:
        """Whether the graph that was compiled last holds a region that was lowered."""
        return bool(self.graphs) and any(isinstance(outcome, LoweredRegion) for outcome in self.graphs[-1].outcomes)

    @property
    def has_chunked(self) -> bool:
        """Whether any region was lowered so far."""
        return any(isinstance(outcome, LoweredRegion) for outcome in self.outcomes)

    @property
    def has_parameters(self) -> bool:
        """Whether any of its graphs reads a living parameter."""
        return any(graph.alive_parameters() for graph in self.graphs)

    @property
    def num_graphs(self) -> int:
        return len(self.graphs)

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

    def note_loop(self, module: str, place: str, obstacle: str) -> None:
        """Note that a loop which skips experts without rows stays as it is written.

        Args:
            module: whose code it is, as a path.
            place: "file:line" of what is in the way, or of the condition that skips an expert.
            obstacle: what is in the way.
        """
        where = Where(module, place)
        log.info("a loop stays as it is written: %s, at %s", obstacle, place)
        if all(refusal.where != where for refusal in self.refused_in_attempts):
            self.refused_in_attempts.append(Refusal(where, Reason.BODY_NOT_RUN, obstacle, ""))

    def start_attempt(self, capture_flags: tuple[str, ...]) -> None:
        """Forget the graphs of an abandoned attempt and begin one under these flags."""
        self.capture_flags = capture_flags
        self.graphs.clear()
        self._compiled.clear()
        self._forget_bytes()

    def add_graph(self, inputs: Sequence[object]) -> CapturedGraph:
        """Open the record of one captured graph with these inputs, parameters among them."""
        graph = CapturedGraph()
        self.hold_graph(graph, inputs)
        return graph

    def drop_graph(self, graph: CapturedGraph) -> None:
        """Forget a graph whose compilation was given up."""
        self.graphs = [other for other in self.graphs if other is not graph]
        self.history.forget(graph)
        self._forget_bytes()

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

    def context_key(self) -> object:
        """Return a key that is equal where plans are equal."""
        return None if self.context is None else self.context.key

    def held_bytes(self) -> int:
        """Return the bytes of parameters, gradients and optimizer state of all graphs, as far as they exist now."""
        return sum(static_terms(self._parameters(), self._known_optimizers()).values()) + gradient_bytes(self.graphs)

    def persistent_bytes(self, members: Sequence[Owner]) -> int:
        """Return the bytes of the members' parameters and optimizer state, which a first step may have yet to make."""
        key = frozenset(map(id, members))
        if self._persistent is None or self._persistent[0] != key:
            parameters, optimizers = parameters_of(members), self._known_optimizers()
            existing_bytes = sum(static_terms(parameters, optimizers).values())
            self._persistent = key, existing_bytes + foreseen_state_bytes(parameters, optimizers)
        return self._persistent[1]

    def latest_runs(self) -> tuple[RunMemory, ...]:
        """Return the memory of each graph that ran in the latest step that trained."""
        return tuple(run.memory for run in self.history.latest_pass(self.graphs))

    def static_terms(self) -> dict[str, int]:
        """Return the bytes that existed before the latest step that trained, by term."""
        runs = self.history.latest_pass(self.graphs)
        terms = static_terms(parameters_of(self._members()), self._known_optimizers())
        terms["gradients before the step"] = runs[0].gradient_bytes if runs else 0
        terms["inputs and buffers"] = sum(run.input_bytes for run in runs)
        return terms

    def note_step(self, *, is_first: bool) -> None:
        """Note that an optimizer of its parameters stepped. The first time, the bytes before a step change."""
        self.history.note_optimizer_step()
        if is_first:
            self._optimizers = None
            self._forget_bytes()

    def hold_graph(self, graph: CapturedGraph, inputs: Sequence[object]) -> None:
        """Hold a graph's record for as long as its parameters live."""
        myself = weakref.ref(self)

        def forget_if_dead() -> None:
            session = myself()
            if session is not None and not graph.alive_parameters():
                session.drop_graph(graph)

        if graph.note_inputs(inputs, forget_if_dead):
            if not any(other is graph for other in self.graphs):
                self.graphs.append(graph)
            self._optimizers = None
            self._forget_bytes()

    def _forget_bytes(self) -> None:
        """Forget the bytes that exist before a step, because they changed, and let every region plan again."""
        self._persistent = None
        self.device_limits.clear()
        self.forget_plans()

    def _members(self) -> Sequence[Owner]:
        """Return the callers of the graphs in the latest steps; the graphs themselves where nothing has run."""
        own = set(self.graphs)
        return [
            caller for caller in self.history.members() if caller.graph in own and self._owns(caller)
        ] or self.graphs

    def _owns(self, caller: Caller) -> bool:
        """Whether a caller is the model or one of its layers: another model may share the graph."""
        wanted = self._wanted
        return wanted is None or any(id(parameter) in wanted for parameter in caller.alive_parameters())

    def _parameters(self) -> list[torch.Tensor]:
        return parameters_of(self.graphs)

    def _known_optimizers(self) -> list[torch.optim.Optimizer]:
        if self._optimizers is None:
            self._optimizers = weakref.WeakSet(living_optimizers(self._parameters()))
            for optimizer in self._optimizers:
                sessions_of_optimizer.setdefault(optimizer, weakref.WeakSet()).add(self)
        return list(self._optimizers)

    def reads_any(self, parameters: Collection[int]) -> bool:
        """Whether its graphs read one of the parameters with these ids."""
        return any(id(parameter) in parameters for parameter in self._parameters())

    def forget_plans(self) -> None:
        """Let every region plan again at its next call, because more is known of the step."""
        self.peaks.forget()
        for outcome in self.outcomes:
            if isinstance(outcome, LoweredRegion):
                outcome.live.forget_plans()
        for head in self.lowered_heads:
            head.live.forget_plans()

    def restricted_to(self, parameters: Iterable[torch.Tensor]) -> Session | None:
        """The session with only the graphs that hold one of these parameters; None if there is none."""
        wanted = frozenset(id(parameter) for parameter in parameters)
        graphs = [graph for graph in self.graphs if any(id(alive) in wanted for alive in graph.alive_parameters())]
        return replace(self, graphs=graphs, _wanted=wanted) if graphs else None

    def without_regions(self, model: torch.nn.Module | None) -> Session | None:
        """Return the part of the session that belongs to a model if nothing in it was chunked; None in later calls.

        Args:
            model: the one that runs, None where that is not known: then the whole session counts.
        """
        part = None if model is None else self.restricted_to(model.parameters())
        if part is None:
            part, model = self, None
        if part.has_chunked or (self.has_warned if model is None else model in self._warned_models):
            return None
        self.has_warned = True
        if model is not None:
            self._warned_models.add(model)
        return part

    def warn_of_failure(self, where: Where, message: str) -> None:
        """Log an allocation failure of one region; the first of the session is a warning too."""
        log.info("%s: %s", where, message)
        if not self.has_warned_of_failure:
            self.has_warned_of_failure = True
            warnings.warn(f"{where}: {message}", RuntimeWarning, stacklevel=2)


sessions_of_optimizer: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[Session]] = (
    weakref.WeakKeyDictionary()
)
"""The sessions whose graphs read parameters of an optimizer, of optimizers that a session has asked for."""
_region_numbers = itertools.count()


def next_region_id(body_key: str) -> str:
    """Return the id of a newly lowered region or head: the content hash of its body and a running number."""
    return f"{body_key}/{next(_region_numbers)}"
