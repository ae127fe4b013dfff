"""The committed rows of suite ep, and the schedule on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.expert_parallel import Findings
from benchmarks.measures.ep_scale import SLICE_LIMIT, Model, point, slices_of
from benchmarks.readme import RESULTS
from benchmarks.suites.ep import PAPER_LOADS, describe, describe_paper


@pytest.fixture
def found() -> Findings:
    return Findings.from_json((RESULTS / "ep_cpu.json").read_text())


def test_committed_peaks_in_rounds_do_not_follow_the_skew(found: Findings) -> None:
    text = describe(found)
    assert "DISAGREES" not in text
    verdicts = [line for line in text.splitlines() if "peak of balanced" in line]
    rounds = [line for line in verdicts if " rounds, " in line]
    assert len(rounds) >= 3 and all(line.startswith("met") for line in rounds)


def test_with_help_committed_rows_are_even_and_peaks_stay_below_the_even_step_s(found: Findings) -> None:
    rows = {(row.peer, row.load): row for row in found.rows}
    for peer in ("help 2", "kept and help 2"):
        for load in ("zipf:1", "paper:15", "one"):
            assert rows["unchunked", load].busiest_over_mean > 1.8
            assert rows[peer, load].busiest_over_mean <= 1.15
            assert rows[peer, load].peak <= 1.1 * rows[peer, "balanced"].peak


def test_committed_peaks_of_what_is_kept_are_bounded_too(found: Findings) -> None:
    """Under skew some rounds are not kept and have their working set beside what is: that of a round."""
    peaks = {(row.peer, row.load): row.peak for row in found.rows}
    room = peaks["rounds", "balanced"]
    for load in ("zipf:1", "paper:15", "one"):
        assert peaks["kept", load] - peaks["kept", "balanced"] < room


def test_a_peer_that_computes_something_else_is_named(found: Findings) -> None:
    first, *others = found.rows
    falsified = replace(found, rows=(replace(first, gradient_norm=1.01 * first.gradient_norm), *others))
    assert "DISAGREES: rounds, balanced: gradient_norm" in describe(falsified)


def test_rows_survive_json(found: Findings) -> None:
    assert describe(Findings.from_json(found.to_json())) == describe(found)


def test_on_paper_a_rank_receives_at_most_r_rows_of_any_load() -> None:
    even, skewed = (point(64, load, 32768, Model()) for load in ("balanced", "one"))
    assert even.bytes_bounded == skewed.bytes_bounded < skewed.bytes_unchunked / 30
    assert (even.rounds, skewed.rounds) == (1, 32)


def test_on_paper_slices_keep_their_bound_only_when_hot_tokens_are_spread() -> None:
    spread, together = slices_of(64, SLICE_LIMIT, 1.0, Model()), slices_of(64, SLICE_LIMIT, 0.5, Model())
    assert spread.most == SLICE_LIMIT and together.most == 2 * SLICE_LIMIT
    assert spread.chosen == together.chosen


def test_committed_rows_of_the_paper_s_methods_across_ranks_agree_and_rows_are_bounded() -> None:
    found = Findings.from_json((RESULTS / "paper_ep_cpu.json").read_text())

    assert "DISAGREES" not in describe_paper(found)
    peaks = {(row.peer, row.load): row.peak for row in found.rows}
    assert peaks["rounds of 4096", "paper:15"] <= 1.01 * peaks["rounds of 4096", "paper:8"]
    assert all(peaks["rounds of 4096", load] < peaks["layer again", load] / 4 for load in PAPER_LOADS)
