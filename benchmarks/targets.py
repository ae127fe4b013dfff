"""What the project set out to reach, beside what the rows say."""

from collections.abc import Sequence

from benchmarks.records import Row, Sizes
from benchmarks.summaries import Summary, summaries_of

FULL_RECOMPUTE = "compile+checkpoint"
NO_RECOMPUTE = "compile"


def at_most(what: str, value: float, limit: float) -> str:
    return f"{'met' if value <= limit else 'NOT MET':8}{what}: {value:.3f}, at most {limit:g}"


def at_least(what: str, value: float, limit: float) -> str:
    return f"{'met' if value >= limit else 'NOT MET':8}{what}: {value:.3f}, at least {limit:g}"


def peak_and_time(rows: Sequence[Row], sizes: Sizes, peers: Sequence[str], peak_share: float) -> str:
    """Per dtype and peer of ours: its peak against full recomputation, its time against plain torch.compile.

    Args:
        rows: of a suite.
        sizes: for which the targets were set; rows of others are not judged.
        peers: of ours.
        peak_share: at most, of full recomputation's peak.
    """
    summaries = [one for one in summaries_of(rows) if one.job.sizes == sizes]
    if not summaries:
        return f"Targets are set for {sizes}"
    lines: list[str] = []
    for dtype in dict.fromkeys(one.job.dtype for one in summaries):
        found: dict[str, Summary] = {one.job.peer: one for one in summaries if one.job.dtype == dtype}
        for peer in peers:
            one, full, plain = (found.get(name) for name in (peer, FULL_RECOMPUTE, NO_RECOMPUTE))
            if one and full:
                share = one.peak_bytes / full.peak_bytes
                lines.append(at_most(f"{dtype}, {peer}: peak against {FULL_RECOMPUTE}", share, peak_share))
            if one and plain:
                seconds = one.step_seconds / plain.step_seconds
                lines.append(at_most(f"{dtype}, {peer}: time against {NO_RECOMPUTE}", seconds, 1.0))
    return "\n".join(["Targets", *lines]) if lines else "Targets: their peers were not measured"
