"""MemFine's experiment (arXiv 2511.21431): full recomputation, fixed c = 8, MACT, and our rows axis.

One process computes what the most loaded expert-parallel rank of each printed layer computes
(benchmarks.workloads.layer). Widths and received rows are divided by the same number, so that weights, rows and
s'_max keep their proportions.
"""

from collections.abc import Sequence

import torch

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite
from benchmarks.summaries import MIB, Summary, align, summaries_of, tokens_of
from memfine_fx.memory.closed_form import chunk_count, max_rows
from memfine_fx.memory.published import ALPHA, GB, IMBALANCE, M_GPU, METHODS, MODEL, NUM_GPUS, PARALLEL, rank_rows

SCALE, QUICK_SCALE = 16, 64
# The paper trains in BF16. On CPU, oneDNN prepares a bf16 kernel for every new number of rows, and the rows of
# 12 layers x 8 experts x chunks are all different: seconds of a first step that no later step pays again.
_DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
_TOP_K = 4  # choices on this rank of a token that visits it; the paper's mean on its hottest rank is 4 to 5
_THROUGHPUT_II = {"full recomputation": 1408.0, "8 chunks": 1332.1, "MACT": 1470.2}


def most_rows(scale: int) -> int:
    """s'_max of the paper's model I by its equation (2), scaled."""
    return max_rows(MODEL, PARALLEL, M_sta=METHODS[0].static_gb * GB, M_GPU=M_GPU, alpha=ALPHA) // scale


def sizes_at(scale: int) -> Sizes:
    """Of the most loaded layer."""
    return Sizes(
        batch=1,
        sequence=round(max(rank_rows(one) for one in IMBALANCE) / scale / _TOP_K),
        hidden=MODEL.h // scale,
        width=MODEL.g_e // scale,
        experts=MODEL.e_n // NUM_GPUS,
        top_k=_TOP_K,
    )


def _peers(scale: int) -> dict[str, tuple[str, str]]:
    """Peer -> (what it is, the paper's method it stands for)."""
    slices = -(-sizes_at(scale).sequence // 8)
    return {
        "eager+checkpoint": ("Method 1: full recomputation", "full recomputation"),
        "fcda-c8": ("Method 2: 8 token chunks", "8 chunks"),
        f"fcda-mact{most_rows(scale)}": ("Method 3: MACT, bins 1 2 4 8", "MACT"),
        "compile+checkpoint": ("full recomputation, torch.compile", ""),
        f"memfine-mact{most_rows(scale)}": ("ours, rows axis, MACT's bins and s'_max", ""),
        f"memfine-T{slices}": (f"ours, tokens axis, {slices} tokens a slice", ""),
        "memfine": ("ours, rows axis", ""),
    }


def _parts(quick: bool) -> Sequence[Part]:
    scale = QUICK_SCALE if quick else SCALE
    names = tuple(_peers(scale))
    chosen = (names[0], names[2], "memfine") if quick else names
    return [Part("rank", sizes_at(scale), _DTYPE, chosen, load="paper:15")]


def _conclude(rows: Sequence[Row]) -> str:
    summaries = {one.job.peer: one for one in summaries_of(rows)}
    scale = MODEL.h // rows[0].job.sizes.hidden
    first = summaries.get("eager+checkpoint")
    if first is None:
        return "The paper's table needs the peer eager+checkpoint."
    title = f"MemFine's table, measured on the hottest rank of each printed layer, widths and rows 1/{scale}"
    return "\n".join([title, _table(summaries, first, scale), "", _chunk_map(scale), "", *_READING])


def _table(summaries: dict[str, Summary], first: Summary, scale: int) -> str:
    cells = [["", "active MiB", "of Method 1", "tokens/s", "of Method 1", "paper: active", "paper: tokens/s"]]
    for peer, (what, method) in _peers(scale).items():
        if (one := summaries.get(peer)) is not None:
            active = [f"{one.peak_bytes / MIB:.1f}", f"{one.peak_bytes / first.peak_bytes:.3f}"]
            speed = [f"{tokens_of(one) / one.step_seconds:,.0f}", f"{first.step_seconds / one.step_seconds:.3f}"]
            cells.append([what, *active, *speed, *paper_figures(method)])
    return align(cells)


def paper_figures(method: str) -> list[str]:
    """Active memory and throughput of the paper's model II against its full recomputation, "-" where it has none."""
    if not method:
        return ["-", "-"]
    active = {one.name: one.active_gb for one in METHODS if one.model == "II"}
    return [f"{figures[method] / figures['full recomputation']:.3f}" for figures in (active, _THROUGHPUT_II)]


def _chunk_map(scale: int) -> str:
    rows = [rank_rows(one) / scale for one in IMBALANCE]
    chunks = [chunk_count(received, most_rows(scale)) for received in rows]
    cells = [
        ["layer", *(str(one.layer) for one in IMBALANCE)],
        ["rows received", *(f"{received:,.0f}" for received in rows)],
        ["MACT's c", *map(str, chunks)],
    ]
    return align(cells)


_READING = (
    "On a CPU it runs in fp32; the paper in BF16.",
    "Reproduced: Methods 1 to 3 as the paper defines them (its equations 2 and 4, its bins, its printed imbalance),",
    "on the experts of one rank: active memory beyond parameters and gradients, and time of the MoE layers.",
    "Not reproduced: the paper's totals. There are no 32 GPUs, no all-to-all, no attention, no dense layers and no",
    "shared expert here, so the sequence's fixed 0.9 GB is absent and its throughput is of whole training steps on",
    "other hardware. Rows per expert between the printed percentiles are interpolated, and the hottest experts are",
    "taken to share a rank. Its gain of 4.42% over full recomputation is not explained by its model: chunks add work.",
)

SUITE = Suite(
    "paper",
    "MemFine's Methods 1, 2, 3 and our rows axis under its printed imbalance",
    _parts,
    rounds=2,
    device="any",
    conclude=_conclude,
)
