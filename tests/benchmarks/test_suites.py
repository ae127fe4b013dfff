"""What the suites ask for, and what they say about their rows."""

from dataclasses import replace

import pytest

from benchmarks.peers import find_peer
from benchmarks.records import Row
from benchmarks.suites import SUITES, jobs_of
from benchmarks.suites.layer import FULL
from benchmarks.suites.model import FULL as MODEL
from benchmarks.suites.model import FURTHER
from benchmarks.suites.moeblaze import CONFIGS, sizes_of
from benchmarks.suites.paper import SCALE, most_rows, sizes_at
from benchmarks.tables import conclusions, disagreements
from tests.benchmarks.rows import row_of


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("quick", [True, False])
def test_every_peer_of_every_suite_exists(suite: str, quick: bool) -> None:
    for job in jobs_of(suite, quick=quick, peers=None, steps=1):
        assert find_peer(job.workload, job.peer).name == job.peer


def test_the_paper_s_sizes_keep_their_proportions() -> None:
    sizes = sizes_at(SCALE)

    assert (sizes.hidden, sizes.width, sizes.experts) == (7168 // SCALE, 2048 // SCALE, 8)
    assert sizes.routed_rows * SCALE == pytest.approx(635_000, rel=0.01)  # layer 15's hottest rank
    assert most_rows(SCALE) * SCALE == pytest.approx(302_000, rel=0.01)


def test_moeblaze_s_configurations_are_the_printed_ones_at_full_size() -> None:
    full = [sizes_of(config, is_full=True) for config in CONFIGS]

    assert [(size.hidden, size.experts, size.top_k, size.tokens) for size in full[2:4]] == [
        (1024, 16, 4, 65536),
        (2048, 16, 4, 32768),
    ]
    assert all(size.width == 4 * size.hidden for size in full)


def test_the_paper_s_table_holds_measured_and_printed_shares() -> None:
    jobs = {job.peer: job for job in jobs_of("paper", quick=False, peers=None, steps=1)}
    rows = [
        _as(row_of("eager+checkpoint", peak_mib=100, seconds=2.0), jobs["eager+checkpoint"].peer, jobs),
        _as(row_of("fcda-c8", peak_mib=20, seconds=4.0), "fcda-c8", jobs),
        _as(row_of("memfine", peak_mib=10, seconds=1.0), "memfine", jobs),
    ]

    (text,) = conclusions(rows)

    line = next(line for line in text.splitlines() if line.startswith("Method 2"))
    assert line.split()[-5:] == ["0.200", line.split()[-4], "0.500", "0.162", "0.946"]
    assert "Not reproduced" in text


def _as(row: Row, peer: str, jobs: dict) -> Row:
    return replace(row, job=jobs[peer])


def _sweep(peer: str, points: tuple[str, ...], peaks: tuple[float, ...], seconds: tuple[float, ...]) -> Row:
    row = row_of(peer, suite="scaling", workload="sweep", points=points)
    assert row.measurement is not None
    series = {"peak_bytes": peaks, "seconds": seconds}
    return replace(row, measurement=replace(row.measurement, series=series))


def test_growth_is_fitted_over_the_longer_half() -> None:
    points = tuple(f"T={number}" for number in (1, 2, 4, 8))

    (text,) = conclusions([_sweep("memfine", points, (500, 500, 900, 1700), (1, 2, 4, 8))])

    cells = text.splitlines()[-3].split()
    assert cells[5:8] == ["200", "1.56", "0.0"]  # bytes a token; outputs of 128 bytes; MiB at T=0
    assert cells[-1] == "1.00"


def test_skew_is_the_worst_load_over_the_even_one() -> None:
    (text,) = conclusions([_sweep("memfine", ("load=balanced", "load=one"), (100, 125), (1, 3))])

    assert text.splitlines()[-2].split()[-2:] == ["1.250", "3.00"]
    assert text.splitlines()[-1].startswith("NOT MET memfine: worst load's peak")


def test_sweeps_of_other_sizes_are_tables_of_their_own() -> None:
    small = _sweep("memfine", ("load=balanced", "load=one"), (100, 101), (1, 1))
    large = replace(small, job=replace(small.job, sizes=replace(small.job.sizes, hidden=4 * small.job.sizes.hidden)))

    (text,) = conclusions([small, large])

    assert text.count("Peak MiB by load") == text.count("met     memfine: worst load's peak") == 2


def test_the_longest_sequence_is_compared_with_full_recomputation() -> None:
    def search(peer: str, tokens: float) -> Row:
        row = row_of(peer, suite="scaling", workload="longest", limit_bytes=1 << 26)
        assert row.measurement is not None
        return replace(row, measurement=replace(row.measurement, series={"tokens": (tokens,)}))

    (text,) = conclusions([search("eager", 500), search("compile+checkpoint", 1000), search("memfine", 4500)])

    assert text.splitlines()[-2].split()[:3] == ["memfine", "4,500", "4.50"]
    assert text.splitlines()[-1].startswith("met ")


def test_compile_times_stand_beside_each_other() -> None:
    cold = row_of("compile", suite="compile")
    assert cold.measurement is not None
    warm = replace(cold, round=1, measurement=replace(cold.measurement, cold=False, compile_seconds=1.5))

    (text,) = conclusions([cold, warm])

    assert text.splitlines()[-1].split()[-4:] == ["7.0", "1.5", "1", "-"]


def test_a_peer_that_computes_something_else_is_named() -> None:
    wrong = row_of("diy")
    assert wrong.measurement is not None
    wrong = replace(wrong, measurement=replace(wrong.measurement, value=0.7))

    (said,) = disagreements([row_of("eager"), wrong, row_of("memfine")])

    assert "diy: VALUE DIFFERS" in said


def test_targets_are_met_or_said_not_to_be() -> None:
    rows = [
        row_of("compile", peak_mib=90, seconds=1.0, sizes=FULL),
        row_of("compile+checkpoint", peak_mib=80, seconds=2.0, sizes=FULL),
    ]

    (text,) = conclusions([*rows, row_of("memfine", peak_mib=8, seconds=1.1, sizes=FULL)])

    assert text.splitlines()[1:] == [
        "met     float32, memfine: peak against compile+checkpoint: 0.100, at most 0.125",
        "NOT MET float32, memfine: time against compile: 1.100, at most 1",
    ]


def test_models_are_judged_by_time_and_by_the_whole_peak() -> None:
    named = {"compile": (100, 1.0), "memfine": (50, 0.95), "memfine-least": (40, 1.05)}
    rows = []
    for workload, sizes in (("model", MODEL), ("model:mixtral", FURTHER)):
        for peer, (whole_mib, seconds) in named.items():
            row = row_of(peer, seconds=seconds, suite="model", workload=workload, sizes=sizes)
            assert row.measurement is not None
            rows.append(replace(row, measurement=replace(row.measurement, whole_peak_bytes=whole_mib << 20)))

    (text,) = conclusions(rows)

    assert "met     model, memfine: time against compile: 0.950, at most 1" in text
    assert "NOT MET model:mixtral, memfine: whole peak against memfine-least: 1.250, at most 1.005" in text


def test_quick_sizes_are_not_judged() -> None:
    (text,) = conclusions([row_of("compile"), row_of("compile+checkpoint"), row_of("memfine", seconds=9.0)])

    assert text == f"Targets are set for {FULL}"
