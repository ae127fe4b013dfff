"""R by the model of a window's time: no device, no Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfine_fx.kernels.window_size import KNOWN_RATES, DeviceFigures, LayerSizes, rows_per_window, seconds_of

H100 = DeviceFigures(132, 50_000_000, *KNOWN_RATES["sm_90"])
QWEN3 = LayerSizes(65536, 128, 2048, 768, 2)


@pytest.mark.parametrize("most", (1, 100, 16384, 40000, 65536, 10**9))
def test_windows_have_no_more_rows_than_the_plan_allows(most: int) -> None:
    rows = rows_per_window(QWEN3, H100, most)
    assert 1 <= rows <= min(most, QWEN3.num_rows)
    assert rows == -(-QWEN3.num_rows // -(-QWEN3.num_rows // rows))  # as even as their number allows


@pytest.mark.parametrize("most", (5000, 16384, 65536))
def test_the_choice_is_no_slower_than_the_plan_s_own(most: int) -> None:
    chosen = rows_per_window(QWEN3, H100, most)
    assert seconds_of(QWEN3, H100, chosen) <= seconds_of(QWEN3, H100, -(-QWEN3.num_rows // -(-QWEN3.num_rows // most)))


def test_a_layer_without_rows_has_one_window() -> None:
    assert rows_per_window(replace(QWEN3, num_rows=0), H100, 5) == 1


def test_slow_memory_and_a_small_cache_make_windows_that_fit_it() -> None:
    narrow = replace(H100, bytes_per_second=1e10)
    rows = rows_per_window(QWEN3, narrow, QWEN3.num_rows)
    assert rows * QWEN3.width * QWEN3.entry_bytes <= narrow.cache_bytes // 2
    assert rows_per_window(QWEN3, replace(narrow, cache_bytes=2**40), QWEN3.num_rows) == QWEN3.num_rows


def test_few_units_leave_a_layer_whole() -> None:
    """Where waves are many, another window saves nothing and costs its launches and a cut expert."""
    small = replace(H100, units=1, cache_bytes=2**40)
    assert rows_per_window(QWEN3, small, QWEN3.num_rows) == QWEN3.num_rows


def test_a_wave_that_is_hardly_begun_is_seen() -> None:
    """A row more than fills the units costs every kernel over rows another wave."""
    sizes = LayerSizes(128 * 132, 1, 8192, 8192, 2, tile_rows=128, tile_columns=8192)
    full, more = (seconds_of(replace(sizes, num_rows=rows), H100, rows) for rows in (128 * 132, 128 * 132 + 1))
    assert more > 1.5 * full


def test_rates_are_those_of_the_data_sheets() -> None:
    pytest.importorskip("pydantic", reason="data sheets are read with pydantic, which a bare machine with a GPU lacks")
    from memfine_planner.hardware.systems import builtin_systems
    from memfine_planner.hardware.vendors import builtin_accelerators

    systems, others = builtin_systems(), builtin_accelerators()
    for target, name in (("sm_80", "A100-80GB"), ("sm_90", "H100"), ("sm_100", "B200")):
        assert KNOWN_RATES[target] == (systems[name].rate("BF16"), systems[name].memory_gb_per_s * 1e9)
    sheet = others["MI300X"]
    assert KNOWN_RATES["gfx942"] == (sheet.tflops["BF16"] * 1e12, sheet.memory_gb_per_s * 1e9)
