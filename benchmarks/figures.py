"""Charts of rows: time against peak, memory over a step, bars per peer, growth, skew, layers."""

from collections.abc import Iterator, Sequence

from benchmarks.records import Row
from benchmarks.summaries import MIB, Summary, summaries_of
from memfine_fx.report.chart import Axis, Box, Chart, Line, Mark, Note, bars

# Families of peers have one colour in every figure, by the first stem that fits; ours stands out.
_COLOURS = {
    "memfine+": "good", "memfine-R": "series3", "memfine-mact": "series13", "memfine-": "series11",
    "memfine": "accent", "compile-budget": "series1", "compile+": "series4", "compile": "series0",
    "eager+": "series15", "eager": "soft", "diy": "series6", "fcda-c": "series6", "fcda-mact": "series14",
    "deepspeed": "series7", "liger": "series8",
}  # fmt: skip
# Beyond this ratio of the largest to the smallest an axis is logarithmic.
_WIDE = 20
_PEAK, _STEP = "peak beyond parameters and gradients, MiB", "step, s"
# Suites whose tables are one comparison each; others show growth, or one picture for all their tables.
_COMPARING = ("layer", "model", "paper", "budget", "gpu")
_SHOWN_OVER_TIME = ("eager", "compile", "compile+checkpoint", "diy", "memfine", "memfine+checkpoint")


def colour_of(peer: str) -> str:
    return next((colour for stem, colour in _COLOURS.items() if peer.startswith(stem)), "series10")


def charts_of(rows: Sequence[Row]) -> dict[str, Chart]:
    """Return title -> chart of every figure that the rows have the data for."""
    drawn: dict[str, Chart] = {}
    for table in dict.fromkeys(row.job.table for row in rows):
        title = table.partition(": ")[2].partition(", from")[0]
        summaries = summaries_of([row for row in rows if row.job.table == table])
        drawn |= {f"{name}: {title}": chart for name, chart in _drawings(summaries)}
    of_configs = summaries_of([row for row in rows if row.job.suite == "moeblaze"])
    return drawn | ({"Peak of MoEBlaze's configurations": _configs(of_configs)} if of_configs else {})


def _drawings(summaries: Sequence[Summary]) -> Iterator[tuple[str, Chart]]:
    if summaries and summaries[0].job.workload == "front":
        yield "Step time by memory", _front(summaries)
    if len(summaries) < 2:
        return
    workload, points = summaries[0].job.workload, summaries[0].job.points
    if summaries[0].job.suite in _COMPARING and workload in ("layer", "model", "rank"):
        yield "Time against peak", _pareto(summaries)
        yield "Peak and step time by peer", _peaks(summaries)
        if any(_is_over_time(summary) for summary in summaries):
            yield "Live memory over one step, each on its own clock", _timeline(summaries)
    if workload == "rank":
        layers = summaries[0].last.series["layer"]
        ticks = [(layer, f"{layer:g}") for layer in layers]
        x = Axis("layer of the paper's run, under its printed imbalance", ticks=ticks)
        yield "Active memory by layer", _lines(summaries, layers, x, Axis("active MiB of the hottest rank"))
    if workload == "sweep" and points[0].startswith("T="):
        tokens = [float(value) for value in _values(points)]
        x = Axis("tokens", is_log=True, ticks=[(number, f"{number / 1024:.0f}K") for number in tokens])
        yield "Peak by tokens", _lines(summaries, tokens, x, Axis(_PEAK, is_log=True))
        yield "Step time by tokens", _lines(summaries, tokens, x, Axis(_STEP, is_log=True), "seconds", 1.0)
    if workload == "sweep" and points[0].startswith("load="):
        loads = list(enumerate(_values(points)))
        x = Axis("load on the experts, from even to all tokens on the same K", ticks=loads)
        yield "Peak by skew of the routing", _lines(summaries, range(len(points)), x, Axis(_PEAK))
    if workload == "longest":
        longest = sorted((summary.last.series["tokens"][0], summary.job.peer) for summary in summaries)
        label = f"longest sequence within {summaries[0].job.limit_bytes / MIB:.0f} MiB, tokens"
        rows = [(peer, tokens, f"{tokens:,.0f}", colour_of(peer)) for tokens, peer in longest]
        yield "Longest sequence in a fixed limit, by bisection", bars(rows, Axis(label))


def _pareto(summaries: Sequence[Summary]) -> Chart:
    points = sorted((summary.peak_bytes / MIB, summary.step_seconds, summary.job.peer) for summary in summaries)
    front: list[tuple[float, float]] = []
    for peak, seconds, _ in points:
        if not front or seconds < front[-1][1]:
            front.append((peak, seconds))
    unbeaten = Line(front, "nothing is left of and below it", "accent", is_dashed=True)
    every = [seconds for _, seconds, _ in points]
    y = Axis(_STEP, is_log=max(every) > _WIDE * min(every))
    x = Axis(_PEAK, high=4 * points[-1][0], is_log=True)  # room for names
    return Chart(x, y, [unbeaten, *_named(points)], height=300)


def _named(points: Sequence[tuple[float, float, str]]) -> list[Mark]:
    marks: list[Mark] = [Line([(x, y)], "", colour_of(peer), "dots") for x, y, peer in points]
    return [*marks, *(Note(x, y, peer, is_apart=True) for x, y, peer in sorted(points, key=lambda point: point[1]))]


def _front(summaries: Sequence[Summary]) -> Chart:
    (summary,) = summaries
    series = summary.last.series
    points = list(zip(summary.job.points, series["peak_bytes"], series["budget_bytes"], series["seconds"], strict=True))
    ours = sorted((budget / MIB, seconds) for _, _, budget, seconds in points if budget)
    peers = [(peak / MIB, seconds, name) for name, peak, budget, seconds in points if not budget]
    label = "memory of the whole step, MiB: peers at their peak, memfine at its budget"
    most = max(ours[-1][0], *(peak for peak, _, _ in peers))
    line = Line(ours, "memfine, at its budget", has_dots=True)
    return Chart(Axis(label, high=1.25 * most), Axis(_STEP), [line, *_named(peers)], height=300)


def _peaks(summaries: Sequence[Summary]) -> Chart:
    peaks = sorted((summary.peak_bytes / MIB, summary.job.peer, summary.step_seconds) for summary in summaries)
    rows = [(peer, peak, f"{peak:,.1f} MiB, {seconds:.3g} s", colour_of(peer)) for peak, peer, seconds in peaks]
    return bars(rows, Axis(_PEAK, is_log=peaks[-1][0] > _WIDE * peaks[0][0]))


def _timeline(summaries: Sequence[Summary]) -> Chart:
    lines = []
    for summary in filter(_is_over_time, summaries):
        series = summary.last.series
        end = max(series["time_ms"][-1], 1e-9)
        points = [
            (100 * time / end, live / MIB) for time, live in zip(series["time_ms"], series["live_bytes"], strict=True)
        ]
        lines.append(Line(points, summary.job.peer, colour_of(summary.job.peer), "steps"))
    x, y = Axis("time, % of the peer's own step", 0, 100), Axis("live memory beyond parameters and gradients, MiB")
    return Chart(x, y, lines)


def _is_over_time(summary: Summary) -> bool:
    return summary.job.peer in _SHOWN_OVER_TIME and "live_bytes" in summary.last.series


def _values(points: Sequence[str]) -> list[str]:
    return [point.partition("=")[2] for point in points]


def _lines(
    summaries: Sequence[Summary],
    places: Sequence[float],
    x: Axis,
    y: Axis,
    name: str = "peak_bytes",
    scale: float = 1 / MIB,
) -> Chart:
    """Return a line a peer: a series of figures over its places."""
    lines = [
        Line(
            [(place, number * scale) for place, number in zip(places, summary.last.series[name], strict=False)],
            summary.job.peer, colour_of(summary.job.peer), has_dots=True,
        )
        for summary in summaries
    ]  # fmt: skip
    return Chart(x, y, lines)


def _configs(summaries: Sequence[Summary]) -> Chart:
    """Return a group of boxes a configuration, a box a peer."""
    sizes = list(dict.fromkeys(summary.job.sizes for summary in summaries))
    peers = list(dict.fromkeys(summary.job.peer for summary in summaries))
    width = 0.8 / len(peers)
    boxes = []
    for summary in summaries:
        peer = summary.job.peer
        left = sizes.index(summary.job.sizes) - 0.4 + peers.index(peer) * width
        boxes.append(Box(left, left + width, 0, summary.peak_bytes / MIB, peer, colour_of(peer)))
    names = [f"T={size.tokens}\nH={size.hidden}\nE={size.experts}\nK={size.top_k}" for size in sizes]
    return Chart(Axis("configuration", ticks=list(enumerate(names))), Axis(_PEAK), boxes)
