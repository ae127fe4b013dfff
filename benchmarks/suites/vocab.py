"""A language model's step with a vocabulary of 128K, where logits and loss are most of the peak."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.records import Row
from benchmarks.suites.base import Part, Suite
from benchmarks.suites.model import FULL as MODEL
from benchmarks.suites.model import QUICK as QUICK_MODEL
from benchmarks.targets import peak_and_time

FULL = replace(MODEL, sequence=1024, vocab=131072)
QUICK = replace(QUICK_MODEL, vocab=16384)
_OURS = ("memfine+head", "memfine+checkpoint+head")
_PEERS = ("compile", "compile+checkpoint", "memfine", *_OURS)
_QUICK_PEERS = ("compile", "memfine+head")


def _parts(quick: bool) -> Sequence[Part]:
    return [Part("model", QUICK if quick else FULL, "float32", _QUICK_PEERS if quick else _PEERS, steps=2)]


def _conclude(rows: Sequence[Row]) -> str:
    return peak_and_time(rows, FULL, _OURS, 0.25)


SUITE = Suite("vocab", "a Qwen3-MoE with a vocabulary of 128K, loss and all gradients", _parts, conclude=_conclude)
