"""Expert parallelism under skew: peak of the busiest rank and time, in rounds and unchunked, on gloo processes here.

All ranks share this machine's cores, so times show what rounds cost and not what a network does.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.suites.base import Suite
from benchmarks.summaries import MIB, align
from benchmarks.targets import at_most


def _compute() -> tuple[str, str]:
    import torch

    from benchmarks.expert_parallel import LayerSizes, as_json, measure
    from benchmarks.machine import describe_machine

    sizes = LayerSizes()
    rows = measure(sizes)
    machine = describe_machine(torch.device("cpu"))
    everything = {"machine": asdict(machine), **as_json(sizes, rows)}
    return f"{machine}\n{sizes}\n\n{describe(everything)}", json.dumps(everything, indent=1)


def describe(everything: dict) -> str:
    """A table of the rows, and what was to be reached."""
    rows = everything["rows"]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    cells = [["peer", "load", "rows of the busiest", "peak MiB", "against balanced", "step s", "schedule"]]
    for row in rows:
        cells.append(
            [
                row["peer"],
                row["load"],
                f"{max(row['received_rows']):,}",
                f"{_peak(row) / MIB:.1f}",
                f"{_peak(row) / _peak(_find(rows, row['peer'], 'balanced')):.3f}",
                f"{_seconds(row):.3f}",
                f"{row['schedule_seconds'] / _seconds(row):.2%}",
            ]
        )
    skewed = [load for load in loads if load != "balanced"]
    verdicts = [
        at_most(
            f"rounds, {load}: peak of the busiest rank against balanced routing",
            _peak(_find(rows, "rounds", load)) / _peak(_find(rows, "rounds", "balanced")),
            1.05,
        )
        for load in skewed
    ]
    verdicts += [
        at_most(
            f"rounds, {load}: time against unchunked",
            _seconds(_find(rows, "rounds", load)) / _seconds(_find(rows, "unchunked", load)),
            1.1 if load == "balanced" else 1.0,
        )
        for load in loads
    ]
    return "\n".join([align(cells), *verdicts, *_disagreements(rows)])


def _disagreements(rows: Sequence[dict]) -> list[str]:
    found = []
    for row in rows:
        reference = _find(rows, "unchunked", row["load"])
        for name in ("output_norm", "gradient_norm"):
            scale = 1.0 if name == "output_norm" or row["peer"] == "unchunked" else float(len(row["peak_bytes"]))
            difference = abs(row[name] * scale / reference[name] - 1)
            if difference > 1e-4:
                found.append(f"DISAGREES: {row['peer']}, {row['load']}: {name} by {difference:.1e}")
    return found


def _find(rows: Sequence[dict], peer: str, load: str) -> dict:
    return next(row for row in rows if row["peer"] == peer and row["load"] == load)


def _peak(row: dict) -> int:
    return max(row["peak_bytes"])


def _seconds(row: dict) -> float:
    return sorted(row["step_seconds"])[len(row["step_seconds"]) // 2]


SUITE = Suite("ep", "peak and time under skew, experts on several ranks", lambda _: (), compute=_compute)
