"""What a step's parts cost in seconds, by rates."""

from __future__ import annotations

from dataclasses import replace

from memfine_fx.plan.cost import DeviceRates, Work, rows_seconds

RATES = DeviceRates(((32, 1e9), (512, 4e9)), copy_bytes=1e9, launch_seconds=1e-6)


def test_rates_between_measured_rows_lie_between_the_measured_rates() -> None:
    assert RATES.flops_at(16) == 0.5e9
    assert RATES.flops_at(272) == 2.5e9
    assert RATES.flops_at(10_000) == RATES.peak_flops == 4e9
    assert Work(4e9, 1e9, 1e6).seconds(RATES) == 3.0


def test_keeping_costs_new_memory_and_copies_of_what_is_made_elsewhere() -> None:
    assert RATES.saving_seconds(5e9, 0) == 0.0
    assert replace(RATES, save_bytes=1e9).saving_seconds(5e9, 2e9) == 5.0 + 4.0


def test_smaller_chunks_cost_time_only_where_they_split_an_expert() -> None:
    def seconds(rows: int) -> float:
        return rows_seconds(
            RATES, num_routed=4096, num_experts=8, flops_per_row=1e6, param_bytes=8_000, rows=rows, takes_group=False
        )

    assert seconds(4096) == seconds(512) < seconds(256) < seconds(64)
