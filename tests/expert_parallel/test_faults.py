"""A rank that dies or hangs is named to the others, in time."""

from __future__ import annotations

import pytest

from tests.expert_parallel.fault_cases import Told, leaving
from tests.expert_parallel.ranks import run_ranks

TIMEOUT_S = 6.0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_leaves_is_an_error_with_layer_and_round(how: str) -> None:
    told = run_ranks(leaving, 2, how, timeout_s=TIMEOUT_S, limit_s=60.0)[0]
    assert isinstance(told, Told)
    assert "in round 2 of 16 in the forward pass of" in told.message and "_experts.py" in told.message
    assert "another rank died, hangs, or raised an error of its own" in told.message
    assert told.seconds < TIMEOUT_S + 5
