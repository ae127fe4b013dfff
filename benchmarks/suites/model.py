"""A whole language model's step; and one with a vocabulary of 128K, where logits and loss are most of the peak."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite, peak_and_time

FULL = Sizes(
    batch=2, sequence=2048, hidden=512, width=512, experts=16, top_k=4, layers=4, heads=8, kv_heads=4, head_dim=64,
    vocab=2048,
)  # fmt: skip
QUICK = Sizes(
    batch=2, sequence=256, hidden=128, width=128, experts=8, top_k=2, layers=1, heads=4, kv_heads=2, head_dim=32,
    vocab=512,
)  # fmt: skip
VOCAB = replace(FULL, sequence=1024, vocab=131072)
VOCAB_QUICK = replace(QUICK, vocab=16384)
_PEERS = (
    "eager", "eager+checkpoint", "compile", "compile+checkpoint", "compile-budget0.5",
    "memfine", "memfine+checkpoint", "memfine-900MiB", "memfine-unlimited",
)  # fmt: skip
_HEADS = ("memfine+head", "memfine+checkpoint+head")


def _parts(quick: bool) -> Sequence[Part]:
    return [Part("model", QUICK if quick else FULL, "float32", ("compile", "memfine") if quick else _PEERS)]


def _vocab_parts(quick: bool) -> Sequence[Part]:
    if quick:
        return [Part("model", VOCAB_QUICK, "float32", ("compile", "memfine+head"), steps=2)]
    return [Part("model", VOCAB, "float32", ("compile", "compile+checkpoint", "memfine", *_HEADS), steps=2)]


def _conclude(rows: Sequence[Row]) -> str:
    return peak_and_time(rows, FULL, ("memfine", "memfine+checkpoint", "memfine-900MiB"), 0.5)


def _conclude_vocab(rows: Sequence[Row]) -> str:
    return peak_and_time(rows, VOCAB, _HEADS, 0.25)


MODEL = Suite("model", "a Qwen3-MoE language model, loss and all gradients", _parts, conclude=_conclude)
VOCABULARY = Suite(
    "vocab", "a Qwen3-MoE with a vocabulary of 128K, loss and all gradients", _vocab_parts, conclude=_conclude_vocab
)
