"""A session: everything one `optimize` (or one `torch.compile(backend="memfine")`) has compiled so far."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from memfine_fx.config import Config
from memfine_fx.records import MoERegion, Refusal
from memfine_fx.report import RegionReport, Report
from memfine_fx.runtime.store import LiveRegion

__all__ = ["LoweredRegion", "Session", "sessions"]


@dataclass(frozen=True)
class LoweredRegion:
    """A raised region, its live counterpart, and T of the call that was captured."""

    region: MoERegion
    live: LiveRegion
    num_tokens_hint: int | None = None


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
    num_graphs: int = 0
    has_warned: bool = False
    outcomes: list[LoweredRegion | Refusal] = field(default_factory=list)

    def report(self, measured_bytes: int | None = None) -> Report:
        regions = tuple(_region_report(outcome) for outcome in self._latest())
        predicted = [region.plan.predicted_bytes for region in regions if region.plan is not None]
        return Report(regions, self.num_graphs, max(predicted, default=None), measured_bytes)

    def _latest(self) -> list[LoweredRegion | Refusal]:
        """One outcome a place: recompilations of the same code replace what they recompiled."""
        latest: dict[object, LoweredRegion | Refusal] = {}
        for outcome in self.outcomes:
            latest[_place(outcome)] = outcome
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
