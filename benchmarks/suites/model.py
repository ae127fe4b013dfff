"""A whole language model's step."""

from collections.abc import Sequence

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite
from benchmarks.targets import peak_and_time

FULL = Sizes(
    batch=2,
    sequence=2048,
    hidden=512,
    width=512,
    experts=16,
    top_k=4,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=64,
    vocab=2048,
)
QUICK = Sizes(
    batch=2,
    sequence=256,
    hidden=128,
    width=128,
    experts=8,
    top_k=2,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=512,
)
_PEERS = (
    "eager",
    "eager+checkpoint",
    "compile",
    "compile+checkpoint",
    "compile-budget0.5",
    "memfine",
    "memfine+checkpoint",
    "memfine-900MiB",
    "memfine-unlimited",
)
_QUICK_PEERS = ("compile", "memfine")


def _parts(quick: bool) -> Sequence[Part]:
    return [Part("model", QUICK if quick else FULL, "float32", _QUICK_PEERS if quick else _PEERS)]


def _conclude(rows: Sequence[Row]) -> str:
    return peak_and_time(rows, FULL, ("memfine", "memfine+checkpoint", "memfine-900MiB"), 0.5)


SUITE = Suite("model", "a Qwen3-MoE language model, loss and all gradients", _parts, conclude=_conclude)
