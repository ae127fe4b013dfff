"""A whole language model's step, further architectures, and a vocabulary of 128K, where logits are most of the peak."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.records import Row, Sizes
from benchmarks.suites.base import Part, Suite, at_most, peak_and_time
from benchmarks.summaries import summaries_of

FULL = Sizes(
    batch=2, sequence=2048, hidden=512, width=512, experts=16, top_k=4, layers=4, heads=8, kv_heads=4, head_dim=64,
    vocab=2048,
)  # fmt: skip
QUICK = Sizes(
    batch=2, sequence=256, hidden=128, width=128, experts=8, top_k=2, layers=1, heads=4, kv_heads=2, head_dim=32,
    vocab=512,
)  # fmt: skip
FURTHER = replace(FULL, sequence=1024, layers=3)
ARCHITECTURES = ("gpt_oss", "deepseek_v3", "mixtral")
VOCAB = replace(FULL, sequence=1024, vocab=131072)
VOCAB_QUICK = replace(QUICK, vocab=16384)
_PEERS = (
    "eager", "eager+checkpoint", "compile", "compile+checkpoint", "compile-budget0.5",
    "memfine", "memfine-least", "memfine+checkpoint", "memfine-900MiB", "memfine-unlimited",
)  # fmt: skip
_PEERS_OF_FURTHER = ("compile", "compile+checkpoint", "memfine", "memfine-unlimited")
_HEADS = ("memfine+head", "memfine+checkpoint+head")


def _parts(quick: bool) -> Sequence[Part]:
    if quick:
        return [Part("model", QUICK, "float32", ("compile", "memfine"))]
    further = [Part(f"model:{name}", FURTHER, "float32", _PEERS_OF_FURTHER) for name in ARCHITECTURES]
    return [Part("model", FULL, "float32", _PEERS), *further]


def _vocab_parts(quick: bool) -> Sequence[Part]:
    if quick:
        return [Part("model", VOCAB_QUICK, "float32", ("compile", "memfine+head"), steps=2)]
    return [Part("model", VOCAB, "float32", ("compile", "compile+checkpoint", "memfine", *_HEADS), steps=2)]


def _conclude(rows: Sequence[Row]) -> str:
    said = peak_and_time(rows, FULL, ("memfine-least", "memfine+checkpoint", "memfine-900MiB"), 0.5)
    lines = []
    for workload in dict.fromkeys(row.job.workload for row in rows):
        found = {one.job.peer: one for one in summaries_of([row for row in rows if row.job.workload == workload])}
        ours, least, plain = (found.get(peer) for peer in ("memfine", "memfine-least", "compile"))
        if ours and plain:
            seconds = ours.step_seconds / plain.step_seconds
            lines.append(at_most(f"{workload}, memfine: time against compile", seconds, 1.0))
        if ours and least and ours.last.whole_peak_bytes and least.last.whole_peak_bytes:
            share = ours.last.whole_peak_bytes / least.last.whole_peak_bytes
            lines.append(at_most(f"{workload}, memfine: whole peak against memfine-least", share, 1.005))
    return "\n".join([said, *lines])


def _conclude_vocab(rows: Sequence[Row]) -> str:
    return peak_and_time(rows, VOCAB, _HEADS, 0.25)


MODEL = Suite("model", "language models, loss and all gradients", _parts, conclude=_conclude)
VOCABULARY = Suite(
    "vocab", "a Qwen3-MoE with a vocabulary of 128K, loss and all gradients", _vocab_parts, conclude=_conclude_vocab
)
