"""Draw the demo's chart: live bytes over one training step, one curve per mode."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memfine_fx.demo.training import ModeResult
from memfine_fx.report.figure import blank_figure

MIB = 2**20

_LABELS = {
    "compile": "torch.compile",
    "checkpoint": "torch.compile + gradient checkpointing",
    "memfine": "memfine_fx.optimize",
}
_COLOURS = {"compile": "#5b6b7f", "checkpoint": "#d9822b", "memfine": "#0a7d5a"}
_LOWEST_FIRST_Z = {"compile": 2, "checkpoint": 3, "memfine": 4}


def draw_memory(results: Sequence[ModeResult], path: Path) -> None:
    """Write the chart as PNG.

    Every mode takes its own time, so forward and backward are each stretched to the same width: the
    boundary between them is one line for all curves.
    """
    figure, axes = blank_figure((9.6, 5.4), "drawing the memory chart")
    top = max(result.peak_bytes for result in results) / MIB
    for result in results:
        _draw_curve(axes, result)
    _decorate(axes, max(top, 1e-3))
    figure.savefig(path)


def stretch_time(result: ModeResult) -> list[float]:
    """Return event times with the forward on [0, 1] and the backward on [1, 2]."""
    boundary = max(result.backward_begins_us, 1e-9)
    length = max(result.times_us[-1] - boundary, 1e-9)
    return [
        max(0.0, time / boundary) if time < boundary else 1 + (time - boundary) / length for time in result.times_us
    ]


def _draw_curve(axes: Any, result: ModeResult) -> None:
    times = stretch_time(result)
    live_mib = [live / MIB for live in result.live_bytes]
    colour, order = _COLOURS[result.mode], _LOWEST_FIRST_Z[result.mode]
    label = f"{_LABELS[result.mode]}: peak {result.peak_bytes / MIB:.0f} MiB"
    axes.plot(times, live_mib, drawstyle="steps-post", color=colour, linewidth=1.3, label=label, zorder=order)
    axes.fill_between(times, live_mib, step="post", color=colour, alpha=0.10, linewidth=0, zorder=order - 1)
    peak = max(range(len(live_mib)), key=live_mib.__getitem__)
    axes.plot(times[peak], live_mib[peak], "o", color=colour, markersize=5, zorder=order)


def _decorate(axes: Any, top_mib: float) -> None:
    axes.set_xlim(0, 2)
    axes.set_ylim(0, top_mib * 1.12)
    axes.axvline(1, color="#333333", linewidth=0.9, linestyle=(0, (4, 3)), zorder=5)
    axes.set_xticks([0, 1, 2], ["step begins", "forward ends,\nbackward begins", "gradients ready"])
    for centre, name in ((0.5, "forward"), (1.5, "backward")):
        axes.text(centre, top_mib * 1.04, name, ha="center", color="#333333", fontsize=11)
    axes.set_ylabel("live memory beyond parameters, gradients\nand optimizer state (MiB)")
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    legend = axes.legend(
        title="Memory over one training step of the same MoE model",
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        frameon=False,
        alignment="left",
    )
    legend.get_title().set(fontweight="bold", fontsize=13)
