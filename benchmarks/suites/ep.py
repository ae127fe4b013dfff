"""Expert parallelism under skew: peak of the busiest rank and time, in rounds and unchunked, on gloo processes here.

All ranks share this machine's cores, so times show what rounds cost and not what a network does.
"""

import json
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.records import Machine
from benchmarks.suites.base import Suite
from benchmarks.summaries import MIB, align
from benchmarks.targets import at_most


def _compute() -> tuple[str, str]:
    from benchmarks.expert_parallel import LayerSizes, as_json, measure

    sizes = LayerSizes()
    everything = as_json(sizes, measure(sizes))
    return f"{Machine(**everything['machine'])}\n{sizes}\n\n{describe(everything)}", json.dumps(everything, indent=1)


def describe(everything: dict) -> str:
    """A table of the rows, and what was to be reached."""
    rows = everything["rows"]
    heads = ["peer", "load", "rows of the busiest", "peak MiB", "against balanced", "step s", "CPU s", "schedule"]
    cells = [heads]
    for row in rows:
        cells.append(
            [
                row["peer"],
                row["load"],
                f"{max(row['received_rows']):,}",
                f"{peak_of(row) / MIB:.1f}",
                f"{peak_of(row) / peak_of(find_row(rows, row['peer'], 'balanced')):.3f}",
                f"{seconds_of(row):.3f}",
                _cpu_seconds(row),
                f"{row['schedule_seconds'] / seconds_of(row):.2%}",
            ]
        )
    return "\n".join([align(cells), *_verdicts(rows), *disagreements(rows)])


def _verdicts(rows: Sequence[dict]) -> Iterator[str]:
    loads = list(dict.fromkeys(row["load"] for row in rows))
    bounded = [(peer, load) for peer in ("rounds", "kept") for load in loads if load != "balanced"]
    for peer, load in bounded:
        if _has(rows, peer, load):
            ratio = peak_of(find_row(rows, peer, load)) / peak_of(find_row(rows, peer, "balanced"))
            yield at_most(f"{peer}, {load}: peak of the busiest rank against balanced routing", ratio, 1.05)
    for load in loads:
        for peer, reference in (
            ("kept", "unchunked"),
            ("rounds", "unchunked"),
            ("rounds", "experts again"),
            ("rounds", "layer again"),
            ("overlapping", "rounds"),
        ):
            if _has(rows, peer, load) and _has(rows, reference, load):
                ratio = seconds_of(find_row(rows, peer, load)) / seconds_of(find_row(rows, reference, load))
                limit = 1.05 if peer == "overlapping" else 1.1 if load == "balanced" else 1.0
                yield at_most(f"{peer}, {load}: time against {reference}", ratio, limit)
    for load in loads:
        row = find_row(rows, "rounds", load)
        yield at_most(
            f"rounds, {load}: counts and schedule against the step", row["schedule_seconds"] / seconds_of(row), 0.01
        )


def disagreements(rows: Sequence[dict], plain: str = "unchunked") -> list[str]:
    """Peers whose output or gradients are not those of the plain one, by their norms."""
    found = []
    for row in rows:
        reference = find_row(rows, plain, row["load"])
        is_plain = row["peer"] in ("unchunked", "experts again", "layer again")  # whose gradients are sums
        for name in ("output_norm", "gradient_norm"):
            scale = 1.0 if name == "output_norm" or is_plain else float(len(row["peak_bytes"]))
            difference = abs(row[name] * scale / reference[name] - 1)
            if difference > 1e-4:
                found.append(f"DISAGREES: {row['peer']}, {row['load']}: {name} by {difference:.1e}")
    return found


def _has(rows: Sequence[dict], peer: str, load: str) -> bool:
    return any(row["peer"] == peer and row["load"] == load for row in rows)


def find_row(rows: Sequence[dict], peer: str, load: str) -> dict:
    return next(row for row in rows if row["peer"] == peer and row["load"] == load)


def peak_of(row: dict) -> int:
    return max(row["peak_bytes"])


def seconds_of(row: dict) -> float:
    return statistics.median(row["step_seconds"])


def _cpu_seconds(row: dict) -> str:
    """Of all ranks; rows of earlier versions have none."""
    return f"{statistics.median(row['cpu_seconds']):.3f}" if "cpu_seconds" in row else ""


SUITE = Suite("ep", "peak and time under skew, experts on several ranks", lambda _: (), compute=_compute)
