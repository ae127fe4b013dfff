"""One MoE layer against everything else that runs it; and bytes only, on small layers.

Suite ``memory`` is the guard against regressions of memory, quick enough for every change: peaks are the same in every
run, so they are compared with committed rows (tests/benchmarks/test_memory_guard.py).
"""

from collections.abc import Sequence

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite, peak_and_time

FULL = Sizes(batch=1, sequence=8192, hidden=512, width=1024, experts=16, top_k=4)
QUICK = Sizes(batch=1, sequence=4096, hidden=128, width=256, experts=8, top_k=2)
GUARDED = Sizes(batch=1, sequence=1024, hidden=64, width=128, experts=8, top_k=2)
_PEERS = (
    "eager", "eager+checkpoint", "compile", "compile+checkpoint", "compile-budget0.1", "compile-budget0.3",
    "compile-budget0.5", "compile-budget0.7", "compile-budget0.9", "diy", "diy+compile", "deepspeed-tiled",
    "liger-tiled", "unsloth-tiled", "batched_mm", "sonicmoe", "scattermoe", "megablocks",
    "memfine", "memfine-unlimited", "memfine-R512", "memfine-tokens",
)  # fmt: skip
_QUICK_PEERS = ("eager", "compile", "compile+checkpoint", "diy", "deepspeed-tiled", "liger-tiled", "memfine")
_BF16_PEERS = (
    "eager", "eager+checkpoint", "compile", "compile+checkpoint", "diy",
    "memfine", "memfine-unlimited", "memfine-tokens",
)  # fmt: skip
_GUARDED_PEERS = ("eager", "diy", "memfine-R256", "memfine-T128")


def _parts(quick: bool) -> Sequence[Part]:
    if quick:
        return [Part("layer", QUICK, "float32", _QUICK_PEERS)]
    return [Part("layer", FULL, "float32", _PEERS), Part("layer", FULL, "bfloat16", _BF16_PEERS)]


def _memory_parts(quick: bool) -> Sequence[Part]:
    return [Part("layer", GUARDED, "float32", _GUARDED_PEERS, load="zipf:1", steps=1)]


def _conclude(rows: Sequence[Row]) -> str:
    return peak_and_time(rows, FULL, ("memfine", "memfine-tokens"), 1 / 8)


LAYER = Suite("layer", "one Qwen3-MoE layer, forward and backward, under every peer", _parts, conclude=_conclude)
MEMORY = Suite("memory", "peaks of small layers, compared with committed ones", _memory_parts, rounds=1)
