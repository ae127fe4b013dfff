"""Pictures of rows, by matplotlib: time against peak, memory over a step, bars per peer, growth, skew, layers.

Each figure is made from one table's rows and comes back as PNG bytes.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import Row
from benchmarks.summaries import MIB, Summary, summaries_of
from memfine_fx.report.figure import blank_figure

# Families of peers keep their colour in every figure, by the first stem that fits; ours stands out.
_COLOURS = {
    "memfine+": "#4fae87", "memfine-R": "#7cc4a4", "memfine-mact": "#2f7f95", "memfine-": "#9bb53c",
    "memfine": "#0a7d5a", "compile-budget": "#a9b8cc", "compile+": "#d9822b", "compile": "#3b5b8c",
    "eager+": "#e0b070", "eager": "#555555", "diy": "#8a5aa8", "fcda-c": "#8a5aa8", "fcda-mact": "#c77ccb",
    "deepspeed": "#b03a48", "liger": "#d4707c",
}  # fmt: skip
_OTHER = "#999999"
# Beyond this ratio of the largest to the smallest an axis is logarithmic.
_WIDE = 20
_PEAK, _STEP = "peak beyond parameters and gradients", "step, s"
# Suites whose tables are one comparison each; others show growth, or one picture for all their tables.
_COMPARING = ("layer", "model", "paper", "budget", "gpu")
_SHOWN_OVER_TIME = ("eager", "compile", "compile+checkpoint", "diy", "memfine", "memfine+checkpoint")


@dataclass(frozen=True)
class Picture:
    """A figure's caption and its PNG."""

    caption: str
    png: bytes


def colour_of(peer: str) -> str:
    return next((colour for stem, colour in _COLOURS.items() if peer.startswith(stem)), _OTHER)


def pictures_of(rows: Sequence[Row]) -> list[Picture]:
    """Every figure that the rows have the data for.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    pictures: list[Picture] = []
    for title in dict.fromkeys(row.job.table for row in rows):
        summaries = summaries_of([row for row in rows if row.job.table == title])
        for draw in _drawings(summaries):
            pictures.append(_picture(draw, title.partition(": ")[2].partition(", from")[0], summaries))
    of_configs = summaries_of([row for row in rows if row.job.suite == "moeblaze"])
    if of_configs:
        pictures.append(_picture(_draw_configs, "MoEBlaze's configurations", of_configs))
    return pictures


Draw = Callable[[Any, Sequence[Summary]], str]  # on axes; returns the caption


def _drawings(summaries: Sequence[Summary]) -> Iterator[Draw]:
    if summaries and summaries[0].job.workload == "front":
        yield _draw_front
    if len(summaries) < 2:
        return
    workload, points = summaries[0].job.workload, summaries[0].job.points
    if summaries[0].job.suite in _COMPARING and workload in ("layer", "model", "rank"):
        yield _draw_pareto
        yield _draw_bars
        if any(_is_over_time(one) for one in summaries):
            yield _draw_timeline
    if workload == "rank":
        yield _draw_layers
    if workload == "sweep" and points[0].startswith("T="):
        yield _draw_growth
        yield _draw_growth_in_time
    if workload == "sweep" and points[0].startswith("load="):
        yield _draw_skew
    if workload == "longest":
        yield _draw_longest


def _picture(draw: Draw, title: str, summaries: Sequence[Summary]) -> Picture:
    figure, axes = blank_figure((7.6, 4.4), "drawing benchmark figures", dpi=95)
    axes.grid(color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    caption = draw(axes, summaries)
    axes.set_title(title, loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return Picture(caption, file.getvalue())


def _draw_pareto(axes: Any, summaries: Sequence[Summary]) -> str:
    points = sorted(((one.peak_bytes / MIB, one.step_seconds, one.job.peer) for one in summaries), key=lambda p: p[:2])
    front, fastest = [], float("inf")
    for peak, seconds, _ in points:
        if seconds < fastest:
            front.append((peak, seconds))
            fastest = seconds
    axes.plot(*zip(*front, strict=True), color="#0a7d5a", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for peak, seconds, peer in points:
        axes.plot(peak, seconds, "o", color=colour_of(peer), markersize=7, zorder=3)
    axes.set(xscale="log", xlim=(points[0][0] / 1.3, points[-1][0] * 2.5), xlabel=f"{_PEAK}, MiB (log)", ylabel=_STEP)
    _plain_ticks(axes.xaxis)
    every = [seconds for _, seconds, _ in points]
    if max(every) > _WIDE * min(every):
        axes.set(yscale="log", ylim=(min(every) / 1.5, max(every) * 1.6))
        _plain_ticks(axes.yaxis)
    else:
        axes.set_ylim(0, max(every) * 1.2)
    _label_apart(axes, points)
    return "Time against peak: nothing left of and below the dashed line"


def _draw_front(axes: Any, summaries: Sequence[Summary]) -> str:
    (summary,) = summaries
    series = summary.last.series
    found = list(zip(summary.job.points, series["peak_bytes"], series["budget_bytes"], series["seconds"], strict=True))
    ours = sorted((budget / MIB, seconds) for _, _, budget, seconds in found if budget)
    axes.plot(*zip(*ours, strict=True), "o-", color=colour_of("memfine"), markersize=5, label="memfine, at its budget")
    peers = [(peak / MIB, seconds, name) for name, peak, budget, seconds in found if not budget]
    for peak, seconds, name in peers:
        axes.plot(peak, seconds, "s", color=colour_of(name), markersize=6, zorder=3)
    axes.set(
        xlim=(ours[0][0] * 0.92, max(ours[-1][0], *(peak for peak, _, _ in peers)) * 1.12),
        ylim=(0, max(seconds for *_, seconds in found) * 1.2),
        xlabel="bytes of the whole step, MiB: peers at their peak, memfine at its budget",
        ylabel=_STEP,
    )
    _label_apart(axes, peers)
    return "Step time by bytes: a budget's best time, and peers where they are"


def _draw_bars(axes: Any, summaries: Sequence[Summary]) -> str:
    bars = sorted((one.peak_bytes / MIB, one.job.peer, one.step_seconds) for one in summaries)
    _bars(axes, [(peer, peak, f"{peak:,.1f} MiB, {seconds:.3g} s") for peak, peer, seconds in bars])
    is_wide = bars[-1][0] > _WIDE * bars[0][0]
    if is_wide:
        axes.set(xscale="log", xlim=(bars[0][0] / 2, bars[-1][0] * 8))
        _plain_ticks(axes.xaxis)
    axes.set_xlabel(f"{_PEAK}, {'MiB (log)' if is_wide else 'MiB'}")
    return "Peak and step time by peer"


def _draw_longest(axes: Any, summaries: Sequence[Summary]) -> str:
    bars = sorted((one.last.series["tokens"][0], one.job.peer) for one in summaries)
    _bars(axes, [(peer, tokens, f"{tokens:,.0f}") for tokens, peer in bars])
    axes.set_xlabel(f"longest sequence within {summaries[0].job.limit_bytes / MIB:.0f} MiB, tokens")
    return "Longest sequence in a fixed limit, by bisection"


def _bars(axes: Any, bars: Sequence[tuple[str, float, str]]) -> None:
    """Of (peer, length, what is written behind it), the longest last."""
    peers, lengths, texts = zip(*bars, strict=True)
    drawn = axes.barh(peers, lengths, color=[colour_of(peer) for peer in peers])
    axes.bar_label(drawn, texts, padding=3, fontsize=7.5)
    axes.set_xlim(0, lengths[-1] * 1.35)


def _draw_timeline(axes: Any, summaries: Sequence[Summary]) -> str:
    for one in filter(_is_over_time, summaries):
        series, colour = one.last.series, colour_of(one.job.peer)
        end = max(series["time_ms"][-1], 1e-9)
        times = [moment / end for moment in series["time_ms"]]
        live = [number / MIB for number in series["live_bytes"]]
        axes.plot(times, live, drawstyle="steps-post", color=colour, linewidth=1.4, label=one.job.peer)
        axes.fill_between(times, live, step="post", color=colour, alpha=0.07, linewidth=0)
    axes.set(xlim=(0, 1), xlabel="share of the step's own time", ylabel="live MiB beyond parameters and gradients")
    axes.set_ylim(bottom=0)
    return "Live memory over one step, each on its own clock"


def _is_over_time(summary: Summary) -> bool:
    return summary.job.peer in _SHOWN_OVER_TIME and "live_bytes" in summary.last.series


def _draw_layers(axes: Any, summaries: Sequence[Summary]) -> str:
    layers = summaries[0].last.series["layer"]
    _lines(axes, summaries, layers, "peak_bytes", 1 / MIB)
    axes.set_ylim(bottom=0)
    axes.set(xticks=layers, xlabel="layer of the paper's run, under its printed imbalance")
    axes.set_ylabel("active MiB of the hottest rank")
    return "Active memory by layer: the deeper, the more skewed"


def _draw_skew(axes: Any, summaries: Sequence[Summary]) -> str:
    _lines(axes, summaries, _values(summaries[0].job.points), "peak_bytes", 1 / MIB)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="load on the experts, from even to all tokens on the same K", ylabel=f"{_PEAK}, MiB")
    return "Peak by skew of the routing"


def _draw_growth(axes: Any, summaries: Sequence[Summary]) -> str:
    _draw_by_tokens(axes, summaries, "peak_bytes", 1 / MIB)
    axes.set_ylabel(f"{_PEAK}, MiB")
    return "Peak by tokens"


def _draw_growth_in_time(axes: Any, summaries: Sequence[Summary]) -> str:
    _draw_by_tokens(axes, summaries, "seconds", 1.0)
    axes.set_ylabel(_STEP)
    return "Step time by tokens"


def _draw_by_tokens(axes: Any, summaries: Sequence[Summary], name: str, scale: float) -> None:
    tokens = [float(value) for value in _values(summaries[0].job.points)]
    _lines(axes, summaries, tokens, name, scale)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens")
    axes.set_xticks(tokens, [f"{number / 1024:.0f}K" for number in tokens])
    _plain_ticks(axes.yaxis)


def _values(points: Sequence[str]) -> list[str]:
    return [point.partition("=")[2] for point in points]


def _lines(axes: Any, summaries: Sequence[Summary], places: Sequence[Any], name: str, scale: float) -> None:
    """One line a peer: a series of figures over its places."""
    for one in summaries:
        values = [number * scale for number in one.last.series[name]]
        axes.plot(places, values, "o-", color=colour_of(one.job.peer), label=one.job.peer, markersize=4)


def _draw_configs(axes: Any, summaries: Sequence[Summary]) -> str:
    sizes = list(dict.fromkeys(one.job.sizes for one in summaries))
    peers = list(dict.fromkeys(one.job.peer for one in summaries))
    width = 0.8 / len(peers)
    for number, peer in enumerate(peers):
        here = [one for one in summaries if one.job.peer == peer]
        places = [sizes.index(one.job.sizes) + (number - (len(peers) - 1) / 2) * width for one in here]
        axes.bar(places, [one.peak_bytes / MIB for one in here], width, color=colour_of(peer), label=peer)
    labels = [f"T={size.tokens}\nH={size.hidden}\nE={size.experts} K={size.top_k}" for size in sizes]
    axes.set_xticks(range(len(sizes)), labels, fontsize=7.5)
    axes.set_ylabel(f"{_PEAK}, MiB")
    return "Peak of MoEBlaze's configurations"


def _label_apart(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Names to the right of their points, moved up where they would cover another, with a thin line back."""
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    taken: list[tuple[float, float, float]] = []  # left, right, height of each label
    for peak, seconds, peer in sorted(points, key=lambda point: point[1]):
        left, height = to_pixels((peak, seconds))
        height += 7  # above the dashed line
        left, right = left + 10, left + 10 + 5.6 * len(peer)
        while any(left < end and begin < right and abs(height - other) < 12 for begin, end, other in taken):
            height += 3
        taken.append((left, right, height))
        line = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        place = to_data((left, height))
        axes.annotate(peer, (peak, seconds), xytext=place, va="center", fontsize=7.5, arrowprops=line)


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axis.set_minor_formatter(NullFormatter())
