"""Memory over one step, with the regions' spans marked: what `report.plot` draws.

A region names its stretches of the step while it runs (`measure.span`, names "forward SITE" and "backward SITE");
the allocator's trace is cut by them afterwards. Predictions stand beside the stretch they are of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memfine_fx.memory.measure import MemoryTrace, begin_of, end_of

__all__ = ["Prediction", "Span", "Timeline", "spans_of", "timeline_of"]


@dataclass(frozen=True)
class Span:
    """One stretch of the step.

    Args:
        name: what ran, "forward WHERE" or "backward WHERE".
        begin_us, end_us: on the clock of the timeline.
    """

    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Prediction:
    """The live bytes foreseen for one stretch of the step.

    Args:
        span: its name, or None for the whole step.
        peak_bytes: most live bytes in it, relative to the start of the step as the timeline's are.
    """

    span: str | None
    peak_bytes: int


@dataclass(frozen=True)
class Timeline:
    """Measured memory over one step and what was predicted of it.

    Args:
        times_us: of each allocation and free.
        live_bytes: after each, relative to the start of the step.
        spans: stretches in which regions ran, in time order.
        predictions: of spans and of the step.
    """

    times_us: tuple[float, ...]
    live_bytes: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    predictions: tuple[Prediction, ...] = ()

    def peak_bytes(self, span: Span | None = None) -> int:
        """Most live bytes during a span, or in the whole step."""
        if span is None:
            return max((0, *self.live_bytes))
        before = [live for time, live in zip(self.times_us, self.live_bytes, strict=True) if time < span.begin_us]
        inside = [
            live
            for time, live in zip(self.times_us, self.live_bytes, strict=True)
            if span.begin_us <= time <= span.end_us
        ]
        return max((before[-1] if before else 0, *inside))


def spans_of(marks: Iterable[tuple[str, float]]) -> tuple[Span, ...]:
    """The stretches that a trace's marks begin and end, in the order in which they began.

    A stretch that never ended, because its step failed in it, is left out.
    """
    begun: dict[str, float] = {}
    spans: list[Span] = []
    for mark, time in marks:
        if (name := begin_of(mark)) is not None:
            begun[name] = time
        elif (name := end_of(mark)) is not None and name in begun:
            spans.append(Span(name, begun.pop(name), time))
    return tuple(sorted(spans, key=lambda span: span.begin_us))


def timeline_of(trace: MemoryTrace, names: Mapping[str, str], predictions: Iterable[Prediction] = ()) -> Timeline:
    """The timeline of a traced step.

    Args:
        trace: of `trace_memory`.
        names: region id -> how to call it in the picture; spans of other regions are left out.
        predictions: under the names of the picture.
    """
    spans = []
    for span in spans_of(trace.marks):
        direction, _, region_id = span.name.partition(" ")
        if region_id in names:
            spans.append(Span(f"{direction} {names[region_id]}", span.begin_us, span.end_us))
    return Timeline(trace.times_us, trace.live_bytes, tuple(spans), tuple(predictions))
