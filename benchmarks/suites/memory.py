"""Bytes only, on small layers: the guard against regressions of memory, quick enough for every change.

Peaks are the same in every run, so they are compared with committed rows (tests/benchmarks/test_memory_guard.py).
"""

from collections.abc import Sequence

from benchmarks.records import Sizes
from benchmarks.suites.base import Part, Suite

SIZES = Sizes(batch=1, sequence=1024, hidden=64, width=128, experts=8, top_k=2)


def _parts(quick: bool) -> Sequence[Part]:
    return [
        Part("layer", SIZES, "float32", ("eager", "diy", "memfine-R256", "memfine-T128"), load="zipf:1", steps=1),
    ]


SUITE = Suite("memory", "peaks of small layers, compared with committed ones", _parts, rounds=1)
