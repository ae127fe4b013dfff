"""The fewest rows a chunk at full speed: from rates that the test gives, within 1% of the best, and never above what
even routing brings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfine_fx.memory.region_bytes import RegionBytes
from memfine_fx.memory.sizes import ROWS
from memfine_fx.plan import rates as rates_module
from memfine_fx.plan.cost import DeviceRates
from memfine_fx.plan.rates import CHOICES, knee_rows, measured_knee
from memfine_fx.plan.rows import wanted_rows
from memfine_fx.runtime.schedule import rows_schedule

HIDDEN, WIDTH, EXPERTS, TOP_K = 128, 256, 32, 4
TABLES = 3 * HIDDEN * WIDTH
LAYER = RegionBytes(
    top_k=TOP_K,
    num_experts=EXPERTS,
    hidden=HIDDEN,
    out_width=HIDDEN,
    item_bytes=4,
    out_item_bytes=4,
    contribution_item_bytes=4,
    accumulator_item_bytes=4,
    weight_item_bytes=4,
    param_bytes=EXPERTS * TABLES * 4,
    staging_bytes=0,
    forward_peak=100 * ROWS,
    backward_peak=200 * ROWS,
    takes_group=False,
    device_type="cpu",
    flops_per_row=2 * TABLES,
)
NO_OVERHEAD = {"copy_bytes": 1e18, "launch_seconds": 0.0}
"""Products alone take time."""


def rates(*by_rows: float, copy_bytes: float = 1e10, launch_seconds: float = 1e-6) -> DeviceRates:
    return DeviceRates(tuple(zip(CHOICES, by_rows, strict=True)), copy_bytes, launch_seconds)


@pytest.mark.parametrize(
    ("by_rows", "rows"),
    [
        ((1e11,) * 6, 64),
        ((1e10, 5e10, 8e10, 1e11, 1e11, 1e11), 512),
        ((1e10, 5e10, 8e10, 0.98e11, 0.995e11, 1e11), 1024),
        ((1e10, 2e10, 4e10, 6e10, 8e10, 1e11), 2048),
    ],
)
def test_the_knee_is_where_products_reach_their_rate(by_rows: tuple[float, ...], rows: int) -> None:
    assert knee_rows(rates(*by_rows, **NO_OVERHEAD), LAYER) == rows


def test_what_a_chunk_takes_beside_its_products_asks_for_more_rows() -> None:
    flat = (1e11,) * 6
    fp32 = knee_rows(rates(*flat), LAYER)
    bf16 = replace(LAYER, staging_bytes=4 * TABLES, param_bytes=LAYER.param_bytes // 2)
    assert 64 < fp32 < knee_rows(rates(*flat), bf16)
    assert knee_rows(rates(*flat, launch_seconds=1e-4), LAYER) > fp32


@given(st.lists(st.floats(1e9, 1e12), min_size=6, max_size=6))
def test_no_smaller_number_is_within_a_hundredth_of_the_best(found: list[float]) -> None:
    chosen = knee_rows(rates(*sorted(found)), LAYER)
    seconds = {rows: rates_module._seconds(rates(*sorted(found)), LAYER, rows) / rows for rows in CHOICES}
    fitting = [rows for rows in CHOICES if seconds[rows] <= 1.01 * min(seconds.values())]
    assert chosen == min(fitting)


@pytest.mark.parametrize("num_tokens", [8192, 2048, 1024, 512])
@pytest.mark.parametrize("measured", CHOICES)
def test_skewed_routing_makes_no_chunk_larger(num_tokens: int, measured: int) -> None:
    """At 1,024, 256, 128 and 64 rows an expert, beside tokens that choose evenly."""
    rows, _ = wanted_rows(replace(LAYER, knee_rows=measured), num_tokens, axis="rows")
    mean = num_tokens * TOP_K // EXPERTS
    chosen = torch.randint(EXPERTS, (num_tokens * TOP_K,), generator=torch.Generator().manual_seed(0))
    drawn = chosen.bincount(minlength=EXPERTS).tolist()
    skewed = [num_tokens] * TOP_K + [0] * (EXPERTS - TOP_K)
    even, most = (
        [chunk.num_rows for chunk in rows_schedule([0, *itertools.accumulate(counts)], rows, groups=False)]
        for counts in (drawn, skewed)
    )
    assert rows == min(measured, mean + 3 * math.isqrt(mean))
    assert max(most) <= rows
    if measured > rows:
        assert len(even) <= 1.1 * EXPERTS, "hardly an expert is split"
        assert max(most) <= 1.2 * max(even)


def test_what_others_decide_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "product_rates", lambda *args: rates(*(1e11,) * 6, **NO_OVERHEAD))
    assert measured_knee(LAYER, torch.float32) == 64
    for other in ({"device_type": "cuda"}, {"takes_group": True}, {"flops_per_row": 0}):
        assert measured_knee(replace(LAYER, **other), torch.float32) is None  # type: ignore[arg-type]
