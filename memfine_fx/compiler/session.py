"""A session: everything one `optimize` (or one `torch.compile(backend="memfine")`) has compiled so far."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfine_fx.compat.checks import warn_outside_tested_range
from memfine_fx.compiler.captured_graph import CapturedGraph, LoweredHead, LoweredRegion
from memfine_fx.compiler.observer import Observer
from memfine_fx.compiler.outcomes import head_report, outcome_report
from memfine_fx.config import Config
from memfine_fx.errors import Reason
from memfine_fx.memory.measure import MemoryTrace
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.static import foreseen_state_bytes, living_optimizers, static_terms
from memfine_fx.memory.step import RunMemory, peak_expression, step_peak
from memfine_fx.memory.timeline import Prediction, timeline_of
from memfine_fx.plan.budget import budget_bytes, describe_budget, device_of
from memfine_fx.plan.peaks import SolvedPeaks
from memfine_fx.plan.runs import Caller, MemoryContext, Owner, RunHistory, gradient_bytes, parameters_of
from memfine_fx.records import Refusal, Where
from memfine_fx.records.verification import VerifyReport
from memfine_fx.report.logs import set_up_logs
from memfine_fx.report.reports import Report, StepReport
from memfine_fx.report.summary import first_step_line, unchunked_layers
from memfine_fx.runtime.store import lookup

__all__ = ["Session", "next_region_id", "open_session", "sessions"]

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
    has_told: bool = False
    has_warned_of_failure: bool = False
    capture_flags: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    hint: str = ""
    refused_in_attempts: list[Refusal] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    _seconds_within: float = 0.0
    _warned_models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    _optimizers: weakref.WeakSet[torch.optim.Optimizer] | None = None
    _graphs: list[CapturedGraph] = field(default_factory=list)
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
        return bool(self._graphs) and any(isinstance(outcome, LoweredRegion) for outcome in self._graphs[-1].outcomes)

    @property
    def has_chunked(self) -> bool:
        """Whether any region was lowered so far."""
        return any(isinstance(outcome, LoweredRegion) for outcome in self.outcomes)

    @property
    def has_parameters(self) -> bool:
        """Whether any of its graphs reads a living parameter."""
        return any(graph.alive_parameters() for graph in self._graphs)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def outcomes(self) -> list[LoweredRegion | Refusal]:
        return [outcome for graph in self._graphs for outcome in graph.outcomes]

    @property
    def lowered(self) -> list[LoweredRegion]:
        """Return the chunked regions of all graphs."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, LoweredRegion)]

    @property
    def lowered_heads(self) -> list[LoweredHead]:
        """Return the chunked heads of all graphs."""
        return [head for graph in self._graphs for head in graph.heads if isinstance(head, LoweredHead)]

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
        self._graphs.clear()
        self._compiled.clear()
        self._forget_bytes()

    def add_graph(self, inputs: Sequence[object]) -> CapturedGraph:
        """Open the record of one captured graph with these inputs, parameters among them."""
        graph = CapturedGraph()
        self.hold_graph(graph, inputs)
        return graph

    def drop_graph(self, graph: CapturedGraph) -> None:
        """Forget a graph whose compilation was given up."""
        self._graphs = [other for other in self._graphs if other is not graph]
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
        return sum(static_terms(self._parameters(), self._known_optimizers()).values()) + gradient_bytes(self._graphs)

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
        return tuple(run.memory for run in self.history.latest_pass(self._graphs))

    def static_terms(self) -> dict[str, int]:
        """Return the bytes that existed before the latest step that trained, by term."""
        runs = self.history.latest_pass(self._graphs)
        terms = static_terms(parameters_of(self._members()), self._known_optimizers())
        terms["gradients before the step"] = runs[0].gradient_bytes if runs else 0
        terms["inputs and buffers"] = sum(run.input_bytes for run in runs)
        return terms

    def note_step(self, optimizer: torch.optim.Optimizer, *, is_first: bool) -> None:
        """An optimizer of its parameters stepped. The first time, the bytes before a step change."""
        self.history.note_optimizer_step()
        if is_first:
            self._optimizers = None
            self._forget_bytes()
            if self.observer.compiles and not self.has_told:
                self.has_told = True
                self._log_first_step()

    def _log_first_step(self) -> None:
        """Log how much was chunked, or warn of layers that run as written."""
        report = self.report()
        line, left = first_step_line(report, self.config.memory_budget), unchunked_layers(report)
        if not left or self.has_warned:
            logging.getLogger("memfine_fx").info("%s", line)
            return
        reasons = "; ".join(f"{region.where}: {region.reason}" for region in left)
        warnings.warn(
            f"memfine_fx: {line}. The others run as written: {reasons}. print(memfine_fx.report(model)) has what can "
            "be done about each",
            stacklevel=2,
        )

    def hold_graph(self, graph: CapturedGraph, inputs: Sequence[object]) -> None:
        """Hold a graph's record for as long as its parameters live."""
        myself = weakref.ref(self)

        def forget_if_dead() -> None:
            session = myself()
            if session is not None and not graph.alive_parameters():
                session.drop_graph(graph)

        if graph.note_inputs(inputs, forget_if_dead):
            if not any(other is graph for other in self._graphs):
                self._graphs.append(graph)
            self._optimizers = None
            self._forget_bytes()

    def _forget_bytes(self) -> None:
        """Forget the bytes that exist before a step, because they changed, and let every region plan again."""
        self._persistent = None
        self.device_limits.clear()
        self.forget_plans()

    def _members(self) -> Sequence[Owner]:
        """Return the callers of the graphs in the latest steps; the graphs themselves where nothing has run."""
        own = set(self._graphs)
        return [
            caller for caller in self.history.members() if caller.graph in own and self._owns(caller)
        ] or self._graphs

    def _owns(self, caller: Caller) -> bool:
        """Whether a caller is the model or one of its layers: another model may share the graph."""
        wanted = self._wanted
        return wanted is None or any(id(parameter) in wanted for parameter in caller.alive_parameters())

    def _parameters(self) -> list[torch.Tensor]:
        return parameters_of(self._graphs)

    def _known_optimizers(self) -> list[torch.optim.Optimizer]:
        if self._optimizers is None:
            self._optimizers = weakref.WeakSet(living_optimizers(self._parameters()))
            for optimizer in self._optimizers:
                _sessions_of.setdefault(optimizer, weakref.WeakSet()).add(self)
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
        graphs = [graph for graph in self._graphs if any(id(alive) in wanted for alive in graph.alive_parameters())]
        return replace(self, _graphs=graphs, _wanted=wanted) if graphs else None

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

    def report(self, measured: MemoryTrace | None = None, *, has_run: bool = True) -> Report:
        """Return a report of the regions and of the latest step.

        Args:
            measured: the memory of a step that was traced.
            has_run: whether a call of the model has returned.
        """
        regions = tuple(outcome_report(outcome) for outcome in self._latest())
        predicted = [region.plan.predicted_bytes for region in regions if region.plan is not None]
        measured_bytes = None if measured is None else measured.peak_bytes
        step = self._step_report()
        foreseen = [] if step is None else [Prediction(None, step.peak.num_bytes)]
        timeline = None if measured is None else timeline_of(measured, self._names_of_regions(), foreseen)
        notes = (*self.notes, self.hint.removeprefix("; ")) if self.hint and not self.has_chunked else tuple(self.notes)
        return Report(
            regions,
            self.num_graphs,
            max(predicted, default=None),
            measured_bytes,
            timeline,
            step,
            notes,
            tuple(map(head_report, self._latest_heads())),
            has_run or self.num_graphs > 0,
            self.stage_seconds.get("compare", 0.0),
            dict(self.stage_seconds),
        )

    def _step_report(self) -> StepReport | None:
        """Return the report of the latest step that trained; None where none did."""
        runs = self.history.latest_pass(self._graphs)
        memories = [run.memory for run in runs]
        peak = step_peak(memories, self._largest_chunk)
        if peak is None:
            return None
        steps = {id(memory.step): memory.step for memory in memories}
        decision = "; ".join(step.decision for step in steps.values() if step.decision)
        expression = functools.partial(peak_expression, memories, self._largest_chunk)
        budget = describe_budget(self.config, memories, self._device_bytes())
        return StepReport(tuple(self.static_terms().items()), peak, decision, expression, budget)

    def _device_bytes(self) -> int | None:
        """Return the bytes of the accelerator, where these limit the graphs."""
        limited = [] if self.config.has_budget else [graph for graph in self._graphs if graph.is_limited]
        return budget_bytes(self, device_of(limited[-1])) if limited else None

    def _largest_chunk(self, region_id: str, num_tokens: int) -> ChunkSize:
        """The largest chunk of the latest step; before one has run, as many rows as there are routed rows."""
        head = next((head.live for head in self.lowered_heads if head.live.region_id == region_id), None)
        if head is not None:
            return ChunkSize(num_tokens if head.plan is None else head.plan.tokens_per_chunk)
        live = lookup(region_id)
        if not live.num_steps:
            return ChunkSize(num_tokens * live.top_k)
        return ChunkSize(live.largest_chunk, live.stages_gradients)

    def _names_of_regions(self) -> dict[str, str]:
        """Return the module of each lowered region by the region's id."""
        lowered: list[LoweredRegion | LoweredHead] = [*self.lowered, *self.lowered_heads]
        return {outcome.live.region_id: outcome.region.where.module or str(outcome.region.where) for outcome in lowered}

    def verify_report(self) -> VerifyReport:
        verified = tuple(verification for graph in self._graphs for verification in graph.verifications)
        refused = [outcome for outcome in self.outcomes if isinstance(outcome, Refusal)]
        return VerifyReport(
            verified, tuple(refusal for refusal in refused if refusal.reason is not Reason.VERIFICATION_FAILED)
        )

    def _latest_heads(self) -> list[LoweredHead | Refusal]:
        """The heads of `_latest_graphs`, one for each place in the source."""
        latest: dict[object, LoweredHead | Refusal] = {}
        for graph in self._latest_graphs():
            for number, head in enumerate(graph.heads):
                where = head.where if isinstance(head, Refusal) else head.region.where
                latest[where.source, graph.parameter_ids, number] = head
        return list(latest.values())

    def _latest(self) -> list[LoweredRegion | Refusal]:
        """The latest outcome of each place in the source, since a recompilation replaces what was there before."""
        latest: dict[object, LoweredRegion | Refusal] = {}
        for graph in self._latest_graphs():
            counts: Counter[object] = Counter()
            for outcome in graph.outcomes:
                place = (_place(outcome), graph.parameter_ids)
                counts[place] += 1
                latest[place, counts[place]] = outcome
        return [*latest.values(), *self._loops_left(latest.values())]

    def _loops_left(self, outcomes: Collection[LoweredRegion | Refusal]) -> list[Refusal]:
        """Loops that stay as they are written, of modules in which nothing was chunked and which no outcome names."""
        refused_places = {outcome.where for outcome in outcomes if isinstance(outcome, Refusal)}
        chunked = [outcome.region.where.module for outcome in outcomes if isinstance(outcome, LoweredRegion)]
        left = [
            refusal
            for refusal in self.refused_in_attempts
            if refusal.reason is Reason.BODY_NOT_RUN and refusal.where not in refused_places
        ]
        return [refusal for refusal in left if not any(module.startswith(refusal.where.module) for module in chunked)]

    def _latest_graphs(self) -> list[CapturedGraph]:
        """All graphs, those of the latest step that trained at the end: they stand for their places in a report."""
        trained = {id(run.graph) for run in self.history.latest_pass(self._graphs)}
        return sorted(self._graphs, key=lambda graph: id(graph) in trained)


_all_sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
_sessions_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[Session]] = weakref.WeakKeyDictionary()
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_lock = threading.Lock()
_session_numbers = itertools.count()
_region_numbers = itertools.count()


def sessions() -> list[Session]:
    """Every living session of this process, oldest first."""
    return [session for _, session in sorted(_all_sessions.items())]


def open_session(
    config: Config,
    *,
    mode: str | None = None,
    holds_compiled: bool = False,
    observer: Observer | None = None,
) -> Session:
    set_up_logs()
    warn_outside_tested_range()
    session = Session(config, mode, holds_compiled, observer or Observer())
    if config.disable_passes:
        session.notes.append(f"disabled passes: {', '.join(config.disable_passes)}")
    with _lock:
        number = next(_session_numbers)
        if number == 0:
            register_optimizer_step_post_hook(_note_step)
        _all_sessions[number] = session
    return session


def _note_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Tell the sessions of its parameters; all sessions are asked at its first step only."""
    owners = _sessions_of.get(optimizer)
    is_first = optimizer not in _stepped
    # The hook runs after every step of every optimizer in the process, so the answer is kept.
    if owners is None:
        ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = weakref.WeakSet(session for session in sessions() if session.reads_any(ours))
        _sessions_of[optimizer] = owners
    _stepped.add(optimizer)
    for session in list(owners):
        session.note_step(optimizer, is_first=is_first)


def next_region_id(body_key: str) -> str:
    """Return the id of a newly lowered region or head: the content hash of its body and a running number."""
    return f"{body_key}/{next(_region_numbers)}"


def _place(outcome: LoweredRegion | Refusal) -> object:
    where = outcome.region.where if isinstance(outcome, LoweredRegion) else outcome.where
    return (where.module, where.source) if where.module else id(outcome)
