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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdRef

from memfine_fx.config import Config
from memfine_fx.head_records import HeadRefusal, HeadRegion
from memfine_fx.hints import hint_for
from memfine_fx.logs import set_up_logs
from memfine_fx.memory.measure import MemoryTrace
from memfine_fx.memory.region_bytes import ChunkSize
from memfine_fx.memory.static import foreseen_state_bytes, living_optimizers, static_terms
from memfine_fx.memory.step import GraphStep, peak_expression, step_peak
from memfine_fx.memory.timeline import Prediction, timeline_of
from memfine_fx.picture import RegionGraph
from memfine_fx.records import MoERegion, Refusal, Where
from memfine_fx.report import HeadReport, RegionReport, Report, StepReport
from memfine_fx.runtime.live_head import LiveHead
from memfine_fx.runtime.store import LiveRegion, lookup
from memfine_fx.verification import RegionVerification, VerifyReport

__all__ = ["LoweredHead", "LoweredRegion", "Session", "head_report", "outcome_report", "sessions"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoweredRegion:
    """A raised region, its live counterpart, T of the captured call, what verifying it gave, its picture, and why its
    gradients could not be compared with autograd's ("" where they agree)."""

    region: MoERegion
    live: LiveRegion
    num_tokens_hint: int | None = None
    verification: RegionVerification | None = None
    graph: RegionGraph | None = None
    uncompared: str = ""


@dataclass(frozen=True)
class LoweredHead:
    """A head, its live counterpart, T of the captured call, and what verifying it gave."""

    region: HeadRegion
    live: LiveHead
    num_tokens_hint: int | None = None
    verification: RegionVerification | None = None


@dataclass
class CapturedGraph:
    """What one graph gave, and whose it is.

    Args:
        parameters: weak references to the parameters that it reads.
        input_bytes: its other tensor inputs, the model's buffers and the user's batch.
        outcomes: its regions and refusals.
        step: its memory.
        heads: its heads, and losses whose logits stayed whole.
    """

    parameters: tuple[WeakIdRef, ...]
    input_bytes: int = 0
    outcomes: list[LoweredRegion | Refusal] = field(default_factory=list)
    step: GraphStep = field(default_factory=GraphStep)
    verifications: list[RegionVerification] = field(default_factory=list)
    heads: list[LoweredHead | HeadRefusal] = field(default_factory=list)

    @property
    def parameter_ids(self) -> frozenset[int]:
        return frozenset(id(parameter) for parameter in self.alive_parameters())

    def alive_parameters(self) -> list[torch.Tensor]:
        return [parameter for reference in self.parameters if (parameter := reference()) is not None]


@dataclass
class Session:
    """Regions and refusals of one compilation unit, newest graph last.

    Args:
        config: its options.
        is_dry: analyse only; graphs run as captured (`explain`).
        mode: of `torch.compile`, None where it was not given.
        capture_flags: Dynamo flags switched on for this attempt; what they let into a graph must end in regions.
        notes: what was changed on the model or in Dynamo to capture it, for the report.
        stage_seconds: wall time spent in each stage of the pipeline ("find", "raise", "plan", ...).
    """

    config: Config
    is_dry: bool = False
    mode: str | None = None
    has_warned: bool = False
    has_warned_of_failure: bool = False
    capture_flags: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    _seconds_within: float = 0.0
    _warned_models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    _optimizers: weakref.WeakSet[torch.optim.Optimizer] | None = None
    _stepped: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    _graphs: list[CapturedGraph] = field(default_factory=list)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count this time as the stage's, without that of stages within it."""
        started = time.perf_counter()
        before, self._seconds_within = self._seconds_within, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            own = spent - self._seconds_within
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + own
            self._seconds_within = before + spent

    @property
    def has_chunked_last(self) -> bool:
        """Whether the graph that was compiled last holds a region that was lowered."""
        return bool(self._graphs) and any(isinstance(one, LoweredRegion) for one in self._graphs[-1].outcomes)

    @property
    def has_chunked(self) -> bool:
        """Whether any region was lowered so far."""
        return any(isinstance(outcome, LoweredRegion) for outcome in self.outcomes)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def outcomes(self) -> list[LoweredRegion | Refusal]:
        return [outcome for graph in self._graphs for outcome in graph.outcomes]

    @property
    def lowered(self) -> list[LoweredRegion]:
        """Its chunked regions."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, LoweredRegion)]

    @property
    def lowered_heads(self) -> list[LoweredHead]:
        """Its chunked heads."""
        return [head for graph in self._graphs for head in graph.heads if isinstance(head, LoweredHead)]

    def start_attempt(self, capture_flags: tuple[str, ...]) -> None:
        """Forget the graphs of an abandoned attempt and begin one under these flags."""
        self.capture_flags = capture_flags
        self._graphs.clear()

    def add_graph(self, inputs: Iterable[object]) -> CapturedGraph:
        """Open the record of one captured graph with these inputs, parameters among them."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        parameters = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
        others = [tensor for tensor in tensors if not isinstance(tensor, torch.nn.Parameter)]
        num_bytes = sum(int(tensor.numel()) * tensor.dtype.itemsize for tensor in others)
        graph = CapturedGraph(tuple(WeakIdRef(parameter) for parameter in parameters), num_bytes)
        self._graphs.append(graph)
        return graph

    def drop_graph(self, graph: CapturedGraph) -> None:
        """Forget a graph whose compilation was given up."""
        self._graphs = [one for one in self._graphs if one is not graph]

    def latest_graphs(self) -> list[CapturedGraph]:
        """Graphs of one step, in order: a recompilation stands in for what it recompiled."""
        latest = {(graph.parameter_ids, tuple(map(_place, graph.outcomes))): graph for graph in self._graphs}
        return list(latest.values())

    def static_terms(self) -> dict[str, int]:
        """Bytes by term of what is there before a step."""
        parameters = self._parameters()
        terms = static_terms(parameters, self._known_optimizers())
        graphs = self.latest_graphs()
        terms["gradients before the step"] = sum(graph.step.gradient_bytes for graph in graphs)
        terms["inputs and buffers"] = sum(graph.input_bytes for graph in graphs)
        return terms

    def foreseen_bytes(self) -> int:
        """Bytes that will be there before later steps: state of optimizers that have not stepped yet."""
        return foreseen_state_bytes(self._parameters(), self._known_optimizers())

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer stepped. The first time, the bytes before a step change, and plans are made again."""
        known = self._optimizers
        if known is None or optimizer in self._stepped:
            return
        self._stepped.add(optimizer)
        ours = {id(parameter) for parameter in self._parameters()}
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            known.add(optimizer)
            self.forget_plans()

    def _parameters(self) -> list[torch.Tensor]:
        return [one for graph in self._graphs for one in graph.alive_parameters()]

    def _known_optimizers(self) -> list[torch.optim.Optimizer]:
        if self._optimizers is None:
            self._optimizers = weakref.WeakSet(living_optimizers(self._parameters()))
        return list(self._optimizers)

    def forget_plans(self) -> None:
        """Let every region plan again at its next call, because more is known of the step."""
        for outcome in self.outcomes:
            if isinstance(outcome, LoweredRegion):
                outcome.live.forget_plans()
        for head in self.lowered_heads:
            head.live.forget_plans()

    def restricted_to(self, parameters: Iterable[torch.Tensor]) -> Session | None:
        """The session with only the graphs that hold one of these parameters; None if there is none."""
        wanted = {id(parameter) for parameter in parameters}
        kept = [graph for graph in self._graphs if any(id(alive) in wanted for alive in graph.alive_parameters())]
        return replace(self, _graphs=kept) if kept else None

    def without_regions(self, model: torch.nn.Module | None) -> Session | None:
        """Its part that belongs to a model, if nothing in it was chunked; once a model, None later.

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

    def report(self, measured: MemoryTrace | None = None) -> Report:
        """What is known of the regions, and of a step that was traced."""
        regions = tuple(outcome_report(outcome) for outcome in self._latest())
        predicted = [region.plan.predicted_bytes for region in regions if region.plan is not None]
        measured_bytes = None if measured is None else measured.peak_bytes
        step = self._step_report()
        foreseen = [] if step is None else [Prediction(None, step.peak.num_bytes)]
        timeline = None if measured is None else timeline_of(measured, self._names_of_sites(), foreseen)
        notes = tuple(self.notes)
        return Report(
            regions,
            self.num_graphs,
            max(predicted, default=None),
            measured_bytes,
            timeline,
            step,
            notes,
            tuple(map(head_report, self._latest_heads())),
        )

    def _step_report(self) -> StepReport | None:
        graphs = [graph.step for graph in self.latest_graphs()]
        peak = step_peak(graphs, self._largest_chunk)
        if peak is None:
            return None
        decision = "; ".join(graph.decision for graph in graphs if graph.decision)
        expression = functools.partial(peak_expression, graphs, self._largest_chunk)
        return StepReport(tuple(self.static_terms().items()), peak, decision, expression)

    def _largest_chunk(self, site: str, num_tokens: int) -> ChunkSize:
        """The largest chunk of the latest step; before one has run, as many rows as there are routed rows."""
        head = next((head.live for head in self.lowered_heads if head.live.site == site), None)
        if head is not None:
            return ChunkSize(num_tokens if head.plan is None else head.plan.tokens_per_chunk)
        live = lookup(site)
        if not live.num_steps:
            return ChunkSize(num_tokens * live.top_k)
        return ChunkSize(live.largest_chunk, live.stages_gradients)

    def _names_of_sites(self) -> dict[str, str]:
        """Site of each lowered region -> the module it is in."""
        lowered: list[LoweredRegion | LoweredHead] = [*self.lowered, *self.lowered_heads]
        return {one.live.site: one.region.where.module or str(one.region.where) for one in lowered}

    def verify_report(self) -> VerifyReport:
        verified = tuple(verification for graph in self._graphs for verification in graph.verifications)
        failed = {(verification.where, f"verification failed: {verification.failure}") for verification in verified}
        refused = [outcome for outcome in self.outcomes if isinstance(outcome, Refusal)]
        return VerifyReport(verified, tuple(one for one in refused if (one.where, one.reason) not in failed))

    def _latest_heads(self) -> list[LoweredHead | HeadRefusal]:
        """As `_latest`: one a place."""
        latest: dict[object, LoweredHead | HeadRefusal] = {}
        for graph in self._graphs:
            for number, head in enumerate(graph.heads):
                where = head.where if isinstance(head, HeadRefusal) else head.region.where
                latest[where.source, graph.parameter_ids, number] = head
        return list(latest.values())

    def _latest(self) -> list[LoweredRegion | Refusal]:
        """One outcome a place: recompilations of the same code replace what they recompiled."""
        latest: dict[object, LoweredRegion | Refusal] = {}
        for graph in self._graphs:
            seen: Counter[object] = Counter()
            for outcome in graph.outcomes:
                place = (_place(outcome), graph.parameter_ids)
                seen[place] += 1
                latest[place, seen[place]] = outcome
        return list(latest.values())


_all_sessions: list[Session] = []
_lock = threading.Lock()
_site_numbers = itertools.count()


def sessions() -> list[Session]:
    """Every session of this process, oldest first."""
    return list(_all_sessions)


def open_session(config: Config, *, is_dry: bool = False, mode: str | None = None) -> Session:
    set_up_logs()
    session = Session(config, is_dry, mode)
    with _lock:
        if not _all_sessions:
            register_optimizer_step_post_hook(_note_step)
        _all_sessions.append(session)
    return session


def _note_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for session in _all_sessions:
        session.note_step(optimizer)


def next_site(body_key: str) -> str:
    """A key for one call site: the body's content hash and a running number."""
    return f"{body_key}/{next(_site_numbers)}"


def _place(outcome: LoweredRegion | Refusal) -> object:
    where = outcome.region.where if isinstance(outcome, LoweredRegion) else outcome.where
    return (where.module, where.source) if where.module else id(outcome)


def outcome_report(outcome: LoweredRegion | Refusal) -> RegionReport:
    """What is known of one region or refusal now."""
    if isinstance(outcome, Refusal):
        return RegionReport("refused", outcome.where, outcome.reason, node=outcome.node, hint=hint_for(outcome.reason))
    region, live = outcome.region, outcome.live
    return RegionReport(
        "chunked",
        region.where,
        "raised, proved row-wise and lowered" if live.plan is None else live.plan.reason,
        family=region.family,
        dims=region.dims,
        plan=live.plan,
        num_tokens=live.num_tokens,
        num_chunks=live.num_chunks,
        largest_chunk=live.largest_chunk,
        imbalance=live.loads.summary(),
        num_ranks=1 if live.exchange is None else live.exchange.table_shape[0],
        rounds=live.rounds,
        body_key=live.bodies.key,
        verified_error=_verified_error(outcome),
        graph=outcome.graph,
        uncompared=outcome.uncompared,
    )


def head_report(head: LoweredHead | HeadRefusal) -> HeadReport:
    """What is known of one head or refusal now."""
    if isinstance(head, HeadRefusal):
        return HeadReport("refused", head.where, head.reason, node=head.node, hint=hint_for(head.reason))
    live = head.live
    return HeadReport(
        "chunked",
        head.region.where,
        "only the loss reads the logits" if live.plan is None else live.plan.reason,
        dims=head.region.dims,
        plan=live.plan,
        num_tokens=live.num_tokens,
        num_chunks=live.num_chunks,
        drops_logits=bool(head.region.results),
        verified_error=_verified_error(head),
    )


def _verified_error(outcome: LoweredRegion | LoweredHead) -> float | None:
    verification = outcome.verification
    return None if verification is None or verification.worst is None else verification.worst.error
