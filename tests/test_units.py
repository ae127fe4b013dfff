"""Bytes as text: three digits, and a budget that is printed is accepted when it is typed."""

from __future__ import annotations

import random

import pytest

from memfine_fx.config import parse_budget
from memfine_fx.units import budget_text, bytes_of_text, readable_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2_786_552, "2.66 MiB"),
        (781_000_000, "745 MiB"),
        (1023 << 20, "0.999 GiB"),
        (80 << 30, "80.0 GiB"),
        (5 << 50, "5,120 TiB"),
        (-(3 << 20), "-3.00 MiB"),
    ],
)
def test_bytes_have_three_digits(num_bytes: int, text: str) -> None:
    assert readable_bytes(num_bytes) == text


@pytest.mark.parametrize("num_bytes", [1, 1000, 1024, 1025, 37_190_743, 1_382_454_040, (80 << 30) - 1, 7 << 50])
def test_a_budget_that_is_printed_is_accepted_and_holds_the_bytes(num_bytes: int) -> None:
    draw = random.Random(num_bytes)
    for exact in (num_bytes, *(draw.randint(1, 1 << draw.randint(1, 60)) for _ in range(500))):
        accepted = parse_budget(budget_text(exact))
        assert accepted is not None and exact <= accepted <= 1.011 * exact + 1


@pytest.mark.parametrize(("text", "num_bytes"), [("20GiB", 20 << 30), ("1.5 g", 1_500_000_000), ("eightyGB", 0)])
def test_text_is_read_as_bytes(text: str, num_bytes: int) -> None:
    assert bytes_of_text(text) == num_bytes
