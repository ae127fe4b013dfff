"""Peaks of small layers do not grow: the memory suite's bytes against the committed ones."""

from pathlib import Path

import pytest

from benchmarks.compare import Tolerances, compare_rows, format_changes
from benchmarks.harness import read_rows, run_in_process
from benchmarks.readme import RESULTS
from benchmarks.suites import jobs_of

# Inductor of another version fuses differently, by a buffer of a few kilobytes; a routed tensor more is 25% and up.
TOLERANCE = 0.05


@pytest.mark.parametrize(
    "peer", ["eager", *(pytest.param(peer, marks=pytest.mark.slow) for peer in ("memfine-R256", "memfine-T128"))]
)
def test_the_peak_is_the_committed_one(peer: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    committed = [row for row in read_rows(RESULTS / "memory_cpu.jsonl") if row.job.peer == peer]
    (job,) = jobs_of("memory", quick=True, peers=[peer], steps=1)

    row = run_in_process(job, tmp_path / "cache", 300)

    assert row.error is None, row.error
    changes = compare_rows(committed, [row], Tolerances(TOLERANCE, None))
    assert changes and not any(change.is_worse for change in changes), format_changes(changes)
