"""MemFine's methods across ranks: four gloo processes here, routed as three of the layers that the paper prints.

Widths are 1/16 of DeepSeek-V3's. The hottest 64 of its 256 experts live on four ranks, 16 each, so that the busiest
rank has up to 3.4 times the rows of an even one; s'_max is set so that MACT takes c = 1, 2 and 4, as the paper's
limit has it take in these layers. All ranks share this machine's cores, so times are of arithmetic and copies.
"""

import json

from benchmarks.records import Machine
from benchmarks.suites.base import Suite
from benchmarks.suites.ep import disagreements, find_row, peak_of, seconds_of
from benchmarks.suites.paper import SCALE, paper_figures
from benchmarks.summaries import MIB, align
from memfine_fx.memory.closed_form import chunk_count
from memfine_fx.memory.published import MODEL

LOADS = ("paper:4", "paper:8", "paper:15")
S_MAX = 26_624
_FIRST = "layer again"
_PEERS = {
    _FIRST: ("Method 1: full recomputation", "full recomputation"),
    "eight slices": ("Method 2: 8 token slices", "8 chunks"),
    "slices": ("Method 3: MACT, bins 1 2 4 8", "MACT"),
    "rounds": ("ours, rows axis, R = s'_max", ""),
    "rounds of 4096": ("ours, rows axis, R = 4096", ""),
}


def _compute() -> tuple[str, str]:
    from benchmarks.expert_parallel import LayerSizes, as_json, measure

    sizes = LayerSizes(
        hidden=MODEL.h // SCALE, width=MODEL.g_e // SCALE, experts=64, top_k=MODEL.t_k, rows=S_MAX, steps=5
    )
    everything = as_json(sizes, measure(sizes, tuple(_PEERS), LOADS))
    return f"{Machine(**everything['machine'])}\n\n{describe(everything)}", json.dumps(everything, indent=1)


def describe(everything: dict) -> str:
    """A table of the methods, layer by layer, beside the paper's own."""
    rows, sizes = everything["rows"], everything["sizes"]
    tokens = sizes["ranks"] * sizes["tokens"]
    cells = [["layer", "", "active MiB", "of Method 1", "tokens/s", "of Method 1", "paper: active", "paper: tokens/s"]]
    for load in LOADS:
        first = find_row(rows, _FIRST, load)
        for peer, (what, method) in _PEERS.items():
            row = find_row(rows, peer, load)
            cells.append(
                [
                    load.removeprefix("paper:"),
                    what,
                    f"{peak_of(row) / MIB:.1f}",
                    f"{peak_of(row) / peak_of(first):.3f}",
                    f"{tokens / seconds_of(row):,.0f}",
                    f"{seconds_of(first) / seconds_of(row):.3f}",
                    *paper_figures(method),
                ]
            )
    chosen = [["layer", "rows of the busiest rank", "MACT's c"]]
    for load in LOADS:
        most = max(find_row(rows, "slices", load)["received_rows"])
        chosen.append([load.removeprefix("paper:"), f"{most:,}", str(chunk_count(most, sizes["rows"]))])
    heading = (
        f"{sizes['ranks']} ranks, T={sizes['tokens']} a rank, H={sizes['hidden']} F={sizes['width']} "
        f"E={sizes['experts']} K={sizes['top_k']}, float32; s'_max = {sizes['rows']:,} rows"
    )
    return "\n".join([heading, align(cells), "", align(chosen), *disagreements(rows, plain=_FIRST)])


SUITE = Suite("paper_ep", "MemFine's Methods 1, 2, 3 and our rows axis on four ranks", lambda _: (), compute=_compute)
