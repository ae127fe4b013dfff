"""How peak and time grow with tokens, experts, choices, skew and rows a chunk; the longest sequence in a limit."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import linear_regression

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import FULL_RECOMPUTE, Part, Suite, at_least, at_most
from benchmarks.suites.layer import FULL as LAYER
from benchmarks.summaries import MIB, Summary, align, summaries_of

TOKENS = tuple(1024 * 2**power for power in range(8))
LOADS = ("balanced", "zipf:0.5", "zipf:1", "zipf:1.5", "zipf:2", "one")
EXPERTS = (8, 64, 256)
TOP_K = (1, 8)
LIMIT_BYTES = 32 * MIB
LAYER_LIMIT_BYTES = 128 * MIB
SKEW_ALLOWANCE = 1.02
_UNAVOIDABLE = 2.0
_LONG = Sizes(batch=1, sequence=4096, hidden=128, width=128, experts=8, top_k=2)
_SKEWED = Sizes(batch=1, sequence=8192, hidden=128, width=256, experts=32, top_k=4)
_WIDE = Sizes(batch=1, sequence=4096, hidden=256, width=64, experts=64, top_k=4)
_SEARCHED = Sizes(batch=1, sequence=2048, hidden=128, width=256, experts=16, top_k=4)
_SWEEP_PEERS = ("compile", "compile+checkpoint", "diy", "memfine")
_SKEW_PEERS = ("compile", "diy", "memfine", "memfine-R512", "memfine-tokens")
_SEARCH_PEERS = (
    "eager+checkpoint", "compile", "compile+checkpoint", "diy", "liger-tiled", "memfine", "memfine-R512",
)  # fmt: skip
_ROWS_PEERS = tuple(f"memfine-R{rows}" for rows in (128, 512, 2048, 8192))


def _parts(quick: bool) -> Sequence[Part]:
    tokens = tuple(f"T={number}" for number in (TOKENS[:3] if quick else TOKENS))
    loads = tuple(f"load={load}" for load in (LOADS[::5] if quick else LOADS))
    if quick:
        return [
            Part("sweep", _LONG, "float32", ("memfine",), points=tokens, steps=1),
            Part("sweep", replace(_SKEWED, sequence=1024), "float32", ("memfine-R128",), "balanced", loads, steps=3),
            Part(
                "longest", _SEARCHED, "float32", ("eager+checkpoint", "memfine"), limit_bytes=LIMIT_BYTES // 2, steps=1
            ),
        ]
    shapes = [*(replace(_WIDE, experts=experts) for experts in EXPERTS), *(replace(_WIDE, top_k=k) for k in TOP_K)]
    return [
        Part("sweep", _LONG, "float32", _SWEEP_PEERS, points=tokens, steps=1),
        Part("sweep", _SKEWED, "float32", _SKEW_PEERS, "balanced", loads, steps=3),
        Part("longest", _SEARCHED, "float32", _SEARCH_PEERS, limit_bytes=LIMIT_BYTES, steps=1),
        Part("sweep", LAYER, "float32", ("compile", "memfine"), "balanced", loads, steps=1),
        Part("longest", LAYER, "float32", (FULL_RECOMPUTE, "memfine"), limit_bytes=LAYER_LIMIT_BYTES, steps=1),
        *(Part("layer", sizes, "float32", ("compile", "memfine"), steps=3) for sizes in shapes),
        Part("layer", _SKEWED, "float32", _ROWS_PEERS, steps=3),
    ]


def _conclude(rows: Sequence[Row]) -> str:
    summaries = summaries_of(rows)
    sweeps = [one for one in summaries if one.job.workload == "sweep"]
    over_tokens = [one for one in sweeps if one.job.points[0].startswith("T=")]
    over_loads = [one for one in sweeps if one.job.points[0].startswith("load=")]
    searches = [one for one in summaries if one.job.workload == "longest"]
    texts = [
        _growth(over_tokens) if over_tokens else "",
        *(_skew(same) for same in _by_sizes(over_loads)),
        *(_longest(same) for same in _by_sizes(searches)),
        _shapes([one for one in summaries if one.job.workload == "layer"]),
    ]
    return "\n\n".join(text for text in texts if text)


def _by_sizes(summaries: Sequence[Summary]) -> list[list[Summary]]:
    sizes = dict.fromkeys(one.job.sizes for one in summaries)
    return [[one for one in summaries if one.job.sizes == same] for same in sizes]


def points_of(summary: Summary) -> list[float]:
    """Tokens of a sweep's points."""
    return [float(point.partition("=")[2]) for point in summary.job.points]


def _growth(sweeps: Sequence[Summary]) -> str:
    sizes = sweeps[0].job.sizes
    output = 4 * sizes.hidden
    cells = [["peer", *(point for point in sweeps[0].job.points), "B/token", "of output's", "MiB at T=0", "time ~ T^"]]
    for one in sweeps:
        tokens, peaks = points_of(one), one.last.series["peak_bytes"]
        upper = len(tokens) // 2  # below, a chunk is all rows there are
        line = linear_regression(tokens[upper:], peaks[upper:]) if len(tokens) > 3 else linear_regression(tokens, peaks)
        slope = [f"{line.slope:.0f}", f"{line.slope / output:.2f}", f"{line.intercept / MIB:.1f}"]
        growth = f"{exponent(tokens, one.last.series['seconds']):.2f}"
        cells.append([one.job.peer, *(f"{peak / MIB:.1f}" for peak in peaks), *slope, growth])
    head = (
        f"Peak MiB by tokens, H={sizes.hidden} F={sizes.width} E={sizes.experts} K={sizes.top_k}; the slope of a "
        f"straight line through the longer half, in bytes a token and in outputs [T,H] of {output} bytes a token"
    )
    return f"{head}\n{align(cells)}{_growth_target(sweeps)}"


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Of y ~ x ** exponent, by least squares."""
    return linear_regression([math.log(one) for one in x], [math.log(one) for one in y]).slope


def _growth_target(sweeps: Sequence[Summary]) -> str:
    """Between the last two points, where a chunk is long full: what one more token costs, in outputs [T,H].

    Two cannot be avoided: the output, which the caller holds, and the input's gradient while it is made.
    """
    ours = next((one for one in sweeps if one.job.peer == "memfine"), None)
    if ours is None or len(ours.job.points) < 4:
        return ""
    tokens, peaks = points_of(ours), ours.last.series["peak_bytes"]
    slope = (peaks[-1] - peaks[-2]) / (tokens[-1] - tokens[-2]) / (4 * ours.job.sizes.hidden)
    routing = (slope - _UNAVOIDABLE) * 4 * ours.job.sizes.hidden
    what = "memfine: growth a token beyond 64K, in outputs (the output and the input's gradient are two)"
    return f"\n{at_most(what, slope, _UNAVOIDABLE)}\n{'':8}beyond these, mostly routing: {routing:.0f} bytes a token"


def _skew(sweeps: Sequence[Summary]) -> str:
    cells = [
        ["peer", *(point.partition("=")[2] for point in sweeps[0].job.points), "worst/balanced", "time, one/balanced"]
    ]
    verdicts: list[str] = []
    for one in sweeps:
        peaks, seconds = one.last.series["peak_bytes"], one.last.series["seconds"]
        growth = [f"{max(peaks) / peaks[0]:.3f}", f"{seconds[-1] / seconds[0]:.2f}"]
        cells.append([one.job.peer, *(f"{peak / MIB:.2f}" for peak in peaks), *growth])
        if one.job.peer.startswith("memfine"):
            what = f"{one.job.peer}: worst load's peak against the even one's"
            verdicts.append(at_most(what, max(peaks) / peaks[0], SKEW_ALLOWANCE))
    return "\n".join([f"Peak MiB by load, {sweeps[0].job.sizes}", align(cells), *verdicts])


def _longest(searches: Sequence[Summary]) -> str:
    full = next((one for one in searches if one.job.peer == FULL_RECOMPUTE), searches[0])
    cells = [["peer", "longest T", f"of {full.job.peer}"]]
    for one in searches:
        tokens = one.last.series["tokens"][0]
        share = tokens / full.last.series["tokens"][0] if full.last.series["tokens"][0] else float("nan")
        cells.append([one.job.peer, f"{tokens:,.0f}", f"{share:.2f}"])
    sizes, limit = searches[0].job.sizes, searches[0].job.limit_bytes / MIB
    head = f"Longest sequence whose step stays within {limit:.0f} MiB beyond parameters and gradients, "
    ours = [one.last.series["tokens"][0] for one in searches if one.job.peer == "memfine"]
    against = full.last.series["tokens"][0]
    verdicts = [
        at_least(f"memfine: longest sequence against {full.job.peer}", one / against, 4) for one in ours if against
    ]
    head = f"{head}H={sizes.hidden} F={sizes.width} E={sizes.experts} K={sizes.top_k}"
    return "\n".join([head, align(cells), *verdicts])


def _shapes(layers: Sequence[Summary]) -> str:
    if not layers:
        return ""
    cells = [["sizes", "peer", "peak MiB", "step s"]]
    cells += [
        [str(one.job.sizes), one.job.peer, f"{one.peak_bytes / MIB:.1f}", f"{one.step_seconds:.3f}"] for one in layers
    ]
    return f"Peak and time by experts, choices and rows a chunk\n{align(cells)}"


SUITE = Suite(
    "scaling",
    "growth with tokens, experts, choices, skew and rows a chunk; longest sequence in a byte limit",
    _parts,
    rounds=1,
    conclude=_conclude,
)
