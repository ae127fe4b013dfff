"""Logs of interruptions, as events or as counts by cause, read from a user's file or from the published ones.

A log of events is CSV, or a JSON list of objects, with

    time        ISO 8601, or seconds since 1970
    node        name of the node
    component   what failed: gpu, network, host, software, ...
    downtime    seconds until training went on
    cause       in words
    rack        optional: name of what the node shares power or a switch with
    detection, restart   optional: seconds of the downtime until it was noticed, and from then on
    repair      optional: seconds until the node was back in the pool; 0 or empty where it never left

A log names only nodes that failed, so the number of nodes comes from outside; a JSON file may also be an object with
"nodes", "days", "gpus_per_node" and "events". The published ones (data/histories.json) have counts by cause instead.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memfine_fx.errors import ConfigError
from memfine_planner.files import read_json, read_text, refuse_misspelt, validated

__all__ = ["Cause", "Event", "History", "published_histories", "read_history"]

_DATA = Path(__file__).parent / "data" / "histories.json"
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Size = Annotated[int, Field(ge=1)]
_ROUNDED = 1.01
"""Parts of a downtime may be rounded up, each on its own."""


class Event(BaseModel):
    """One line of a log; seconds."""

    model_config = ConfigDict(frozen=True)

    time: datetime
    node: Annotated[str, Field(min_length=1)]
    component: Annotated[str, Field(min_length=1)]
    downtime: _Seconds
    cause: str
    rack: str | None = None
    detection: _Seconds | None = None
    restart: _Seconds | None = None
    repair: _Seconds | None = None

    @model_validator(mode="after")
    def _parts_of_the_downtime(self) -> Event:
        parts = (self.detection or 0.0) + (self.restart or 0.0)
        if parts > self.downtime * _ROUNDED:
            raise ValueError(f"detection and restart add up to {parts:g} s of a downtime of {self.downtime:g} s")
        return self

    @property
    def seconds(self) -> float:
        """Seconds since 1970; a time without a zone is UTC."""
        return (self.time if self.time.tzinfo else self.time.replace(tzinfo=UTC)).timestamp()


class Cause(BaseModel):
    """Interruptions of one cause in a history without single events."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cause: str
    component: str
    count: Annotated[int, Field(ge=0)]
    needs_node: bool = False
    planned: bool = False


@dataclass(frozen=True)
class History:
    """What is known of a cluster's interruptions.

    Args:
        days: observed; None where the source does not say, so that no rate follows.
        events: in order of time; empty for a history of counts.
        causes: counts by cause; empty for a history of events.
        detection, restart: seconds, where a source gives one figure for all.
        checked: whether a published figure was read in its source's text, in its abstract, or quoted by others.
        remarks: what a reader should know of the figures.
    """

    name: str
    nodes: int
    gpus_per_node: int
    days: float | None
    events: tuple[Event, ...] = ()
    causes: tuple[Cause, ...] = ()
    detection: float | None = None
    restart: float | None = None
    source: str = ""
    checked: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def node_hours(self) -> float | None:
        return None if self.days is None else 24 * self.days * self.nodes


class _Published(BaseModel):
    model_config = ConfigDict(extra="forbid")

    source: str
    checked: Literal["text", "abstract", "quoted"]
    remark: str = ""
    nodes: _Size
    gpus_per_node: _Size
    days: Annotated[float, Field(gt=0)] | None
    detection: _Seconds | None = None
    restart: _Seconds | None = None
    causes: tuple[Cause, ...]


class _Log(BaseModel):
    """A JSON log with its own cluster."""

    nodes: _Size | None = None
    gpus_per_node: _Size | None = None
    days: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    events: list[Any]


@cache
def published_histories() -> dict[str, History]:
    """The packaged histories by name."""
    entries = read_json(_DATA, "the published histories")["histories"]
    return {name: _published(name, entry) for name, entry in entries.items()}


def _published(name: str, entry: object) -> History:
    found = validated(_Published, entry, f"{_DATA.name}: {name}")
    remarks = (found.remark,) if found.remark else ()
    fields = found.model_dump(exclude={"remark", "causes"})
    return History(name=name, causes=found.causes, remarks=remarks, **fields)


def read_history(
    source: str, *, nodes: int | None = None, days: float | None = None, gpus_per_node: int = 8
) -> History:
    """A history from a packaged one's name or from a file.

    Args:
        nodes: nodes of the cluster, failed or not; a log of events needs it, unless its file says so.
        days: observed time; without it from the first event to the last.
        gpus_per_node: unless the file says so.

    Raises:
        ConfigError: the file cannot be read, a field is missing or of another kind (named by line), or the number of
            nodes is not known, or given for a published history, which has its own.
    """
    if source in published_histories():
        if nodes is not None or days is not None:
            raise ConfigError(f"the published history {source} has its own nodes and days; give neither")
        return published_histories()[source]
    path = Path(source)
    if path.suffix not in (".csv", ".json"):
        known = ", ".join(published_histories())
        raise ConfigError(f"unknown history {source!r}; known: {known}; or a path to a .csv or .json file")
    log = _Log(events=_csv_rows(path)) if path.suffix == ".csv" else _json_log(path)
    # Line 1 of a CSV file is its header.
    place = "{path}:{line}: row" if path.suffix == ".csv" else "{path}: events[{index}]"
    events = [_event(row, place.format(path=path, line=index + 2, index=index)) for index, row in enumerate(log.events)]
    if not events:
        raise ConfigError(f"{path}: expected at least one event")
    events.sort(key=lambda event: event.seconds)
    nodes = _checked_nodes(path, events, nodes or log.nodes)
    given = days or log.days
    remarks = () if given else ("The observed time is taken from the first event to the last and one gap more.",)
    days = _checked_days(path, events, given)
    return History(path.name, nodes, log.gpus_per_node or gpus_per_node, days, tuple(events), remarks=remarks)


def _checked_nodes(path: Path, events: Sequence[Event], nodes: int | None) -> int:
    failed = len({event.node for event in events})
    if nodes is None:
        raise ConfigError(f"{path}: {failed} nodes failed, but how many are there? Give the number of nodes")
    if nodes < failed:
        raise ConfigError(f"{path}: {failed} nodes failed, which is more than the {nodes} nodes given")
    return nodes


def _checked_days(path: Path, events: Sequence[Event], days: float | None) -> float:
    span = (events[-1].seconds - events[0].seconds) / 86_400
    if days is None:
        if span == 0:
            raise ConfigError(f"{path}: one moment only; give the number of days that were observed")
        # n events span n - 1 gaps.
        return span * len(events) / (len(events) - 1)
    if days < span:
        raise ConfigError(f"{path}: the events span {span:.1f} days, which is more than the {days:g} days given")
    return days


def _csv_rows(path: Path) -> list[Any]:
    """Rows by column name; an empty cell is absent."""
    rows = list(csv.DictReader(read_text(path, "the history").splitlines(), skipinitialspace=True))
    for line, row in enumerate(rows, start=2):
        if None in row:
            raise ConfigError(f"{path}:{line}: more cells than the header has columns")
    return [{name: value for name, value in row.items() if value} for row in rows]


def _json_log(path: Path) -> _Log:
    loaded = read_json(path, "the history")
    if isinstance(loaded, list):
        return _Log(events=loaded)
    log = validated(_Log, loaded, f"{path}: log")
    refuse_misspelt(loaded, _Log.model_fields, f"{path}: log")
    return log


def _event(row: object, where: str) -> Event:
    event = validated(Event, row, where)
    assert isinstance(row, dict)
    refuse_misspelt(row, Event.model_fields, where)
    return event
