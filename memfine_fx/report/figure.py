"""Charts of a report: memory over a measured step, and time against memory of a layer's plans."""

from __future__ import annotations

from collections.abc import Sequence

from memfine_fx.memory.timeline import Timeline
from memfine_fx.plan.front import FrontPoint, MeasuredPoint
from memfine_fx.report.chart import Axis, Box, Chart, Line, Mark, Note, level
from memfine_fx.units import readable_bytes

__all__ = ["front_chart", "timeline_chart"]

MIB = 2**20
_MAX_POINTS = 2000


def timeline_chart(timeline: Timeline) -> Chart:
    """Return live memory over the measured step, with the stretches of chunked regions and what was predicted."""
    marks: list[Mark] = []
    for span in timeline.spans:
        direction = span.name.partition(" ")[0]
        colour = direction if direction in ("forward", "backward") else "soft"
        ends = span.begin_us / 1e3, span.end_us / 1e3, float("-inf"), float("inf")
        marks.append(Box(*ends, f"chunked region, {direction}", colour, 0.3, tip=span.name))
    peak = readable_bytes(timeline.peak_bytes())
    points = [(time / 1e3, num_bytes / MIB) for time, num_bytes in _highest(timeline)]
    marks.append(Line(points, f"measured, peak {peak}", "ink", "steps"))
    spans = {span.name: span for span in timeline.spans}
    for prediction in timeline.predictions:
        height = prediction.peak_bytes / MIB
        if prediction.span is None:
            marks.append(level(height, f"predicted for the step, {readable_bytes(prediction.peak_bytes)}"))
        elif prediction.span in spans:
            stretch = spans[prediction.span]
            ends_ms = (stretch.begin_us / 1e3, height), (stretch.end_us / 1e3, height)
            marks.append(Line(ends_ms, "predicted for a region", "bad"))
    x = Axis("time in the step, ms (while traced)", 0, max((*(time / 1e3 for time in timeline.times_us), 1e-3)))
    return Chart(x, Axis("live memory beyond the start of the step, MiB"), marks)


def _highest(timeline: Timeline) -> list[tuple[float, int]]:
    """Return (time, live bytes), of long steps the highest of each few events, so that the peak stays."""
    events = list(zip(timeline.times_us, timeline.live_bytes, strict=True))
    few = max(1, -(-len(events) // _MAX_POINTS))
    return [max(events[at : at + few], key=lambda event: event[1]) for at in range(0, len(events), few)]


def front_chart(front: Sequence[FrontPoint], measured: Sequence[MeasuredPoint]) -> Chart:
    """Return seconds against peak memory of a layer's plans, with measured peers."""
    plans = [(point.peak_bytes / MIB, point.seconds) for point in front]
    marks: list[Mark] = [Line(plans, "memfine, predicted", has_dots=True)]
    marks += [
        Note(*place, f"R={point.rows}, {point.policy}", is_apart=True)
        for place, point in zip(plans, front, strict=True)
    ]
    if measured:
        peers = [(peer.peak_bytes / MIB, peer.seconds) for peer in measured]
        marks.append(Line(peers, "measured", "series4", "dots"))
        marks += [Note(*place, peer.name, is_apart=True) for place, peer in zip(peers, measured, strict=True)]
    x = Axis("peak beyond parameters and gradients, MiB", is_log=True)
    return Chart(x, Axis("forward and backward, s"), marks, height=360)
