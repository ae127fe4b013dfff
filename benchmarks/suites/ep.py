"""Experts on several gloo processes here: in rounds and unchunked under skew, and by MemFine's methods.

All ranks share this machine's cores, so times are of arithmetic and copies: what rounds cost, not what a network does.

Suite ``ep``: peak of the busiest rank and time by load. Suite ``paper_ep``: three of the layers that the paper prints.
There widths are 1/16 of DeepSeek-V3's, and the hottest 64 of its 256 experts live on four ranks, 16 each, so that the
busiest rank has up to 3.4 times the rows of an even one; s'_max is set so that MACT takes c = 1, 2 and 4, as the
paper's limit has it take in these layers.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.expert_parallel import AGAIN, LOADS, PEERS, Findings, LayerSizes, measure
from benchmarks.suites.base import Suite, at_most
from benchmarks.suites.paper import SCALE, paper_figures
from benchmarks.summaries import MIB, align
from memfine_fx.memory.closed_form import chunk_count
from memfine_fx.memory.published import MODEL

FULL = LayerSizes(steps=9)
_COLUMNS = (
    "peer", "load", "rows of the busiest", "over the mean", "peak MiB", "against balanced", "step s", "of unchunked",
    "CPU s", "of the busiest rank", "counts",
)  # fmt: skip
QUICK = LayerSizes(ranks=2, tokens=256, hidden=64, width=64, experts=8, top_k=2, rows=128, steps=1)
PAPER_LOADS = ("paper:4", "paper:8", "paper:15")
S_MAX = 26_624
_PAPER = LayerSizes(hidden=MODEL.h // SCALE, width=MODEL.g_e // SCALE, experts=64, top_k=MODEL.t_k, rows=S_MAX, steps=5)
_PAPER_QUICK = replace(_PAPER, tokens=_PAPER.tokens // 8, rows=S_MAX // 8, steps=1)
_FIRST = "layer again"
_PAPER_PEERS = {
    _FIRST: ("Method 1: full recomputation", "full recomputation"),
    "eight slices": ("Method 2: 8 token slices", "8 chunks"),
    "slices": ("Method 3: MACT, bins 1 2 4 8", "MACT"),
    "rounds": ("ours, rows axis, R = s'_max", ""),
    "rounds of 4096": ("ours, rows axis, R = 4096", ""),
}


def _compute(quick: bool) -> tuple[str, str]:
    found = measure(QUICK, ("rounds", "unchunked"), ("balanced", "one")) if quick else measure(FULL, PEERS, LOADS)
    return f"{found.machine}\n{found.sizes}\n\n{describe(found)}", found.to_json()


def _compute_paper(quick: bool) -> tuple[str, str]:
    if quick:
        found = measure(_PAPER_QUICK, (_FIRST, "slices", "rounds"), PAPER_LOADS)
    else:
        found = measure(_PAPER, tuple(_PAPER_PEERS), PAPER_LOADS)
    return f"{found.machine}\n\n{describe_paper(found)}", found.to_json()


def describe(found: Findings) -> str:
    """A table of the rows of suite `ep`, and what was to be reached."""
    cells = [list(_COLUMNS)]
    plain = {row.load: row.seconds for row in found.rows if row.peer == "unchunked"}
    for row in found.rows:
        cells.append(
            [
                row.peer,
                row.load,
                f"{max(row.computed_rows):,}",
                f"{row.busiest_over_mean:.2f}",
                f"{row.peak / MIB:.1f}",
                f"{row.peak / found.row(row.peer, 'balanced').peak:.3f}",
                f"{row.seconds:.3f}",
                f"{row.seconds / plain[row.load]:.2f}",
                f"{row.all_cpu_seconds:.3f}",
                f"{row.busiest_cpu:.3f}",
                f"{row.schedule_seconds / row.seconds:.2%}",
            ]
        )
    verdicts = _verdicts(found) if found.sizes == FULL else [f"Targets are set for {FULL}"]
    return "\n".join([align(cells), *verdicts, *disagreements(found)])


def _verdicts(found: Findings) -> Iterator[str]:
    """What was to be reached: even routing, skew without help, and skew with it."""
    present = {(row.peer, row.load): row for row in found.rows}
    even = {peer: present[peer, "balanced"] for peer in ("rounds", "kept", "help 2", "kept and help 2", "unchunked")}
    for peer, limit in (("kept", 1.02), ("rounds", 1.12)):
        yield at_most(f"{peer}, balanced: time of unchunked", even[peer].seconds / even["unchunked"].seconds, limit)
    for peer in ("kept", "rounds"):
        yield at_most(f"{peer}, balanced: peak of unchunked", even[peer].peak / even["unchunked"].peak, 0.3)
    for load in dict.fromkeys(row.load for row in found.rows):
        plain, rounds = present["unchunked", load], present["rounds", load]
        if load != "balanced":
            yield at_most(f"rounds, {load}: time of unchunked", rounds.seconds / plain.seconds, 1.15)
            yield at_most(f"rounds, {load}: peak of balanced", rounds.peak / even["rounds"].peak, 1.1)
        for peer in ("help 2", "kept and help 2"):
            if load == "balanced" or (peer, load) not in present:
                continue
            row = present[peer, load]
            yield at_most(f"{peer}, {load}: rows of the busiest rank over the mean", row.busiest_over_mean, 1.15)
            yield at_most(f"{peer}, {load}: peak of balanced", row.peak / even[peer].peak, 1.1)
            yield at_most(f"{peer}, {load}: time of balanced", row.seconds / even[peer].seconds, 1.25)
            yield at_most(f"{peer}, {load}: time of unchunked", row.seconds / plain.seconds, 0.8)
            if plain.busiest_cpu_seconds:
                ratio = row.busiest_cpu / plain.busiest_cpu
                yield at_most(f"{peer}, {load}: CPU time of the busiest rank of unchunked's", ratio, 0.8)
        share = rounds.schedule_seconds / rounds.seconds
        yield at_most(f"rounds, {load}: counts and schedule of the step", share, 0.005)


def disagreements(found: Findings, plain: str = "unchunked") -> Iterator[str]:
    """Peers whose output or gradients are not those of the plain one, by their norms."""
    for row in found.rows:
        reference = found.row(plain, row.load)
        ranks = 1 if row.peer in AGAIN else len(row.peak_bytes)  # their gradients are sums, others' means over ranks
        for name, scale in (("output_norm", 1), ("gradient_norm", ranks)):
            difference = abs(getattr(row, name) * scale / getattr(reference, name) - 1)
            if difference > 1e-4:
                yield f"DISAGREES: {row.peer}, {row.load}: {name} by {difference:.1e}"


def describe_paper(found: Findings) -> str:
    """A table of the methods, layer by layer, beside the paper's own."""
    sizes, present = found.sizes, {(row.peer, row.load): row for row in found.rows}
    cells = [["layer", "", "active MiB", "of Method 1", "tokens/s", "of Method 1", "paper: active", "paper: tokens/s"]]
    chosen = [["layer", "rows of the busiest rank", "MACT's c"]]
    for load in PAPER_LOADS:
        layer, first = load.removeprefix("paper:"), present[_FIRST, load]
        most = max(present["slices", load].received_rows)
        chosen.append([layer, f"{most:,}", str(chunk_count(most, sizes.rows))])
        for peer, (what, method) in _PAPER_PEERS.items():
            if (row := present.get((peer, load))) is not None:
                active = [f"{row.peak / MIB:.1f}", f"{row.peak / first.peak:.3f}"]
                speed = [f"{sizes.ranks * sizes.tokens / row.seconds:,.0f}", f"{first.seconds / row.seconds:.3f}"]
                cells.append([layer, what, *active, *speed, *paper_figures(method)])
    heading = f"{sizes.ranks} ranks, {sizes.layer}, float32; s'_max = {sizes.rows:,} rows"
    return "\n".join([heading, align(cells), "", align(chosen), *disagreements(found, plain=_FIRST)])


EP = Suite("ep", "peak and time under skew, experts on several ranks", compute=_compute)
PAPER_EP = Suite("paper_ep", "MemFine's Methods 1, 2, 3 and our rows axis on four ranks", compute=_compute_paper)
