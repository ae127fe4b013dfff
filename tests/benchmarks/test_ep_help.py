"""Help for hot experts on paper."""

from __future__ import annotations

import pytest

from benchmarks.measures.ep_help import SLOTS, measure, outcome


@pytest.mark.parametrize("load", ["zipf:1", "paper:4", "paper:15", "one"])
def test_help_evens_rows_out_and_takes_less_time_than_none_and_one_shot(load: str) -> None:
    alone, one_shot, replicated = (outcome(load, 64, policy) for policy in ("no help", "one shot", "help"))
    assert replicated.ratio <= 1.06 and replicated.slots <= SLOTS
    assert replicated.seconds < one_shot.seconds < alone.seconds


def test_even_rows_are_left_alone() -> None:
    assert outcome("balanced", 64, "help").clones == outcome("balanced", 64, "one shot").clones == 0


def test_capacity_is_quick_because_it_drops_rows() -> None:
    found = outcome("paper:15", 64, "capacity")
    assert found.ratio <= 1.25 and found.dropped > 0.5


def test_the_command_prints_a_row_a_policy() -> None:
    table, _, planning = measure(largest=32).lines
    assert table.count("\n| ") >= 23 and planning.startswith("Making the plan took at most")
