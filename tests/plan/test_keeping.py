"""What a step keeps: the choice that fits and takes least time, found by bisection, against trying them all."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from memfine_fx.plan.cost import DeviceRates, Work, rows_seconds
from memfine_fx.plan.keeping import Keepable, choose_step, ranked

RATES = DeviceRates(((32, 1e9), (512, 4e9)), copy_bytes=1e9, launch_seconds=1e-6)


def keepables(sizes: list[tuple[int, int]]) -> list[Keepable]:
    return [Keepable(f"mm_{at}", size, float(gain), False) for at, (size, gain) in enumerate(sizes)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=8),
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=4),
    available=st.integers(0, 300),
)
def test_the_choice_is_the_fastest_front_that_fits(
    sizes: list[tuple[int, int]], rows: list[tuple[int, int]], available: int
) -> None:
    ranking = ranked(keepables(sizes))
    choices = [(number, float(slower)) for number, (_, slower) in enumerate(rows)]

    def peak(count: int, number: int | None) -> int:
        return sum(one.num_bytes for one in ranking[:count]) + rows[number or 0][0]

    chosen = choose_step(ranking, choices, peak, available)
    every = [
        slower + sum(one.seconds for one in ranking[count:])
        for number, slower in choices
        for count in range(len(ranking) + 1)
        if peak(count, number) <= available
    ]
    assert (chosen is None) == (not every)
    if chosen is not None:
        assert chosen.seconds == min(every)
        assert peak(chosen.num_kept, chosen.rows) == chosen.peak_bytes <= available


def test_the_last_layer_comes_first_and_what_costs_time_is_never_kept() -> None:
    dear = Keepable("dear", 10, 9.0, False)
    cheap = Keepable("cheap", 10, 2.0, False)
    last = Keepable("last", 10, 1.0, True)
    costly = Keepable("costly", 10, -1.0, True)
    assert ranked([cheap, costly, last, dear]) == [last, dear, cheap]


def test_rates_between_measured_rows_lie_between_the_measured_rates() -> None:
    assert RATES.flops_at(16) == 0.5e9
    assert RATES.flops_at(272) == 2.5e9
    assert RATES.flops_at(10_000) == RATES.peak_flops == 4e9
    assert Work(4e9, 1e9, 1e6).seconds(RATES) == 3.0


def test_keeping_costs_new_memory_and_copies_of_what_is_made_elsewhere() -> None:
    assert RATES.keeping_seconds(5e9, 0) == 0.0
    assert replace(RATES, keep_bytes=1e9).keeping_seconds(5e9, 2e9) == 5.0 + 4.0


def test_smaller_chunks_cost_time_only_where_they_split_an_expert() -> None:
    def seconds(rows: int) -> float:
        return rows_seconds(
            RATES, num_routed=4096, num_experts=8, flops_per_row=1e6, param_bytes=8_000, rows=rows, takes_group=False
        )

    assert seconds(4096) == seconds(512) < seconds(256) < seconds(64)
