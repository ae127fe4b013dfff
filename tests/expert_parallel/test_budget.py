"""A budget of bytes decides how many rows a round brings, and holds whatever the routing."""

from __future__ import annotations

import pytest

from tests.expert_parallel.budget_cases import BUDGET_BYTES, bytes_of_steps
from tests.expert_parallel.ranks import run_ranks


@pytest.mark.slow
def test_a_budget_holds_under_even_and_worst_routing_and_is_used() -> None:
    by_rank = run_ranks(bytes_of_steps, 2)
    for load in ("balanced", "one"):
        busiest = max(found[load] for found in by_rank)
        assert 0.97 * BUDGET_BYTES < busiest <= BUDGET_BYTES, f"{load}: {busiest:,} of {BUDGET_BYTES:,} B"
