"""A session: everything one `optimize` (or one `torch.compile(backend="memfine")`) has compiled so far."""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch.utils.weak import WeakIdRef

from memfine_fx.config import Config
from memfine_fx.memory.measure import MemoryTrace
from memfine_fx.memory.timeline import timeline_of
from memfine_fx.records import MoERegion, Refusal, Where
from memfine_fx.report import RegionReport, Report
from memfine_fx.runtime.store import LiveRegion

__all__ = ["LoweredRegion", "Session", "sessions"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoweredRegion:
    """A raised region, its live counterpart, and T of the call that was captured."""

    region: MoERegion
    live: LiveRegion
    num_tokens_hint: int | None = None


@dataclass
class CapturedGraph:
    """What one graph gave, and whose it is."""

    parameters: tuple[WeakIdRef, ...]
    outcomes: list[LoweredRegion | Refusal] = field(default_factory=list)

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
        static_bytes: bytes of parameters and their gradients, known once a graph was captured.
        is_dry: analyse only; graphs run as captured (`explain`).
    """

    config: Config
    is_dry: bool = False
    static_bytes: int = 0
    has_warned: bool = False
    has_warned_of_failure: bool = False
    _graphs: list[CapturedGraph] = field(default_factory=list)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def outcomes(self) -> list[LoweredRegion | Refusal]:
        return [outcome for graph in self._graphs for outcome in graph.outcomes]

    def add_graph(self, parameters: Iterable[torch.Tensor]) -> CapturedGraph:
        """Open the record of one captured graph over these parameters."""
        graph = CapturedGraph(tuple(WeakIdRef(parameter) for parameter in parameters))
        self._graphs.append(graph)
        return graph

    def restricted_to(self, parameters: Iterable[torch.Tensor]) -> Session | None:
        """The session with only the graphs that hold one of these parameters; None if there is none."""
        wanted = {id(parameter) for parameter in parameters}
        kept = [graph for graph in self._graphs if any(id(alive) in wanted for alive in graph.alive_parameters())]
        return replace(self, _graphs=kept) if kept else None

    def warn_of_failure(self, where: Where, message: str) -> None:
        """Log an allocation failure of one region; the first of the session is a warning too."""
        log.info("%s: %s", where, message)
        if not self.has_warned_of_failure:
            self.has_warned_of_failure = True
            warnings.warn(f"{where}: {message}", RuntimeWarning, stacklevel=2)

    def report(self, measured: MemoryTrace | None = None) -> Report:
        """What is known of the regions, and of a step that was traced."""
        regions = tuple(_region_report(outcome) for outcome in self._latest())
        predicted = [region.plan.predicted_bytes for region in regions if region.plan is not None]
        measured_bytes = None if measured is None else measured.peak_bytes
        timeline = None if measured is None else timeline_of(measured, self._names_of_sites())
        return Report(regions, self.num_graphs, max(predicted, default=None), measured_bytes, timeline)

    def _names_of_sites(self) -> dict[str, str]:
        """Site of each lowered region -> the module it is in."""
        lowered = [outcome for outcome in self.outcomes if isinstance(outcome, LoweredRegion)]
        return {one.live.site: one.region.where.module or str(one.region.where) for one in lowered}

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


def open_session(config: Config, *, is_dry: bool = False) -> Session:
    session = Session(config, is_dry)
    with _lock:
        _all_sessions.append(session)
    return session


def next_site(body_key: str) -> str:
    """A key for one call site: the body's content hash and a running number."""
    return f"{body_key}/{next(_site_numbers)}"


def _place(outcome: LoweredRegion | Refusal) -> object:
    where = outcome.region.where if isinstance(outcome, LoweredRegion) else outcome.where
    return (where.module, where.source) if where.module else id(outcome)


def _region_report(outcome: LoweredRegion | Refusal) -> RegionReport:
    if isinstance(outcome, Refusal):
        return RegionReport("refused", outcome.where, outcome.reason, node=outcome.node)
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
        body_key=live.bodies.key,
    )
