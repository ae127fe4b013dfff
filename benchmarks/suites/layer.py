"""One MoE layer against everything else that runs it."""

from collections.abc import Sequence

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite
from benchmarks.targets import peak_and_time

FULL = Sizes(batch=1, sequence=8192, hidden=512, width=1024, experts=16, top_k=4)
QUICK = Sizes(batch=1, sequence=4096, hidden=128, width=256, experts=8, top_k=2)
_PEERS = (
    "eager",
    "eager+checkpoint",
    "compile",
    "compile+checkpoint",
    "compile-budget0.1",
    "compile-budget0.3",
    "compile-budget0.5",
    "compile-budget0.7",
    "compile-budget0.9",
    "diy",
    "diy+compile",
    "deepspeed-tiled",
    "liger-tiled",
    "unsloth-tiled",
    "batched_mm",
    "sonicmoe",
    "scattermoe",
    "megablocks",
    "memfine",
    "memfine-unlimited",
    "memfine-R512",
    "memfine-tokens",
)
_QUICK_PEERS = (
    "eager",
    "compile",
    "compile+checkpoint",
    "diy",
    "deepspeed-tiled",
    "liger-tiled",
    "memfine",
)
_BF16_PEERS = (
    "eager",
    "eager+checkpoint",
    "compile",
    "compile+checkpoint",
    "diy",
    "memfine",
    "memfine-unlimited",
    "memfine-tokens",
)


def _parts(quick: bool) -> Sequence[Part]:
    if quick:
        return [Part("layer", QUICK, "float32", _QUICK_PEERS)]
    return [Part("layer", FULL, "float32", _PEERS), Part("layer", FULL, "bfloat16", _BF16_PEERS)]


def _conclude(rows: Sequence[Row]) -> str:
    return peak_and_time(rows, FULL, ("memfine", "memfine-tokens"), 1 / 8)


SUITE = Suite("layer", "one Qwen3-MoE layer, forward and backward, under every peer", _parts, conclude=_conclude)
