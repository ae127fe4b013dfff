"""The search for the longest sequence, and fits of growth."""

from dataclasses import replace

import pytest

from benchmarks.suites.scaling import exponent
from benchmarks.sweeps import MOST_TOKENS, STRIDE, search_longest
from benchmarks.worker import measure
from tests.benchmarks.rows import EAGER


@pytest.mark.parametrize("limit", [STRIDE, 200, 1000, 12345, 99999])
def test_the_search_ends_just_below_the_limit(limit: int) -> None:
    longest = search_longest(lambda tokens: tokens <= limit)

    assert longest <= limit
    assert longest % STRIDE == 0
    assert limit - longest <= max(2 * STRIDE, 0.02 * limit)


def test_where_nothing_fits_the_answer_is_none() -> None:
    assert search_longest(lambda tokens: False) == 0


def test_the_search_stops_where_everything_fits() -> None:
    assert MOST_TOKENS <= search_longest(lambda tokens: True) <= 2 * MOST_TOKENS


def test_a_power_is_found_again() -> None:
    assert exponent([1, 2, 4], [5, 20, 80]) == pytest.approx(2)


def test_a_sweep_gives_one_peak_and_time_per_point() -> None:
    pytest.importorskip("transformers")
    job = replace(EAGER, workload="sweep", load="balanced", points=("T=64", "T=128", "load=one"), steps=1)

    series = measure(job).series

    peaks = series["peak_bytes"]
    assert len(series["seconds"]) == len(peaks) == 3
    assert peaks[1] > 1.8 * peaks[0]


def test_the_longest_sequence_of_the_eager_layer_is_at_its_limit() -> None:
    pytest.importorskip("transformers")
    limit = 1 << 20

    measured = measure(replace(EAGER, workload="longest", limit_bytes=limit, steps=1))

    probes = dict(zip(measured.series["probed_tokens"], measured.series["probed_bytes"], strict=True))
    longest = measured.series["tokens"][0]
    assert probes[longest] <= limit
    assert all(bytes_ > limit for tokens, bytes_ in probes.items() if tokens > longest)


def test_an_unknown_point_is_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="point 'E=4' is unknown"):
        measure(replace(EAGER, workload="sweep", points=("E=4",)))
