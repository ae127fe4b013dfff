"""The seven layers of MoEBlaze's evaluation (arXiv 2601.05296): full size on CUDA, scaled down on CPU.

On CPU every width is divided by 8 and the number of tokens by 16. MoEBlaze's own code is not public; what it
keeps for backward (both first projections and their product) is what torch.compile keeps too.
"""

from collections.abc import Sequence

import torch

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite
from benchmarks.summaries import MIB, align, summaries_of

# (d, E, k, batch, sequence); the FFN is 4 d wide.
CONFIGS = (
    (512, 4, 1, 32, 2048),
    (1024, 8, 2, 32, 2048),
    (1024, 16, 4, 32, 2048),
    (2048, 16, 4, 32, 1024),
    (512, 16, 4, 32, 1024),
    (1024, 16, 4, 16, 1024),
    (2048, 8, 4, 16, 512),
)
WIDTH_SCALE, TOKEN_SCALE = 8, 16
_CPU_PEERS = ("compile", "diy", "memfine")
_CUDA_PEERS = ("compile", "compile+checkpoint", "diy", "scattermoe", "sonicmoe", "megablocks", "memfine")


def sizes_of(config: tuple[int, int, int, int, int], *, is_full: bool) -> Sizes:
    hidden, experts, top_k, batch, sequence = config
    hidden = hidden if is_full else hidden // WIDTH_SCALE
    tokens = batch * sequence if is_full else batch * sequence // TOKEN_SCALE
    return Sizes(batch=1, sequence=tokens, hidden=hidden, width=4 * hidden, experts=experts, top_k=top_k)


def _parts(quick: bool) -> Sequence[Part]:
    is_full = torch.cuda.is_available()
    configs = CONFIGS[:1] if quick else CONFIGS
    peers = _CUDA_PEERS if is_full else ("compile", "memfine") if quick else _CPU_PEERS
    return [Part("layer", sizes_of(config, is_full=is_full), "bfloat16", peers) for config in configs]


def _conclude(rows: Sequence[Row]) -> str:
    """Peak and time of every configuration, in one table."""
    found = {(one.job.sizes, one.job.peer): one for one in summaries_of(rows)}
    peers = list(dict.fromkeys(peer for _, peer in found))
    is_full = any(row.job.device == "cuda" for row in rows)
    cells = [["config", "sizes", *(f"{peer} MiB" for peer in peers), *(f"{peer} s" for peer in peers)]]
    for number, config in enumerate(CONFIGS, start=1):
        sizes = sizes_of(config, is_full=is_full)
        here = [found.get((sizes, peer)) for peer in peers]
        if any(here):
            peaks = [f"{one.peak_bytes / MIB:.1f}" if one else "-" for one in here]
            seconds = [f"{one.step_seconds:.3f}" if one else "-" for one in here]
            cells.append([str(number), str(sizes), *peaks, *seconds])
    scale = "full size" if is_full else f"widths 1/{WIDTH_SCALE}, tokens 1/{TOKEN_SCALE} of the paper's"
    return f"MoEBlaze's configurations, SwiGLU, {scale}; peaks beyond parameters and gradients\n{align(cells)}"


SUITE = Suite(
    "moeblaze", "the seven layers of MoEBlaze's evaluation", _parts, rounds=1, device="any", conclude=_conclude
)
