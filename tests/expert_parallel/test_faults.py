"""A rank that dies or hangs is named to the others, in time."""

from __future__ import annotations

import pytest

from tests.expert_parallel.fault_cases import PLACES, Told, leaving
from tests.expert_parallel.ranks import run_ranks

TIMEOUT_S = 20.0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize("where", PLACES)
def test_a_rank_that_leaves_is_an_error_on_all_others_with_the_layer(how: str, where: str) -> None:
    *others, _ = run_ranks(leaving, 3, how, where, timeout_s=TIMEOUT_S, limit_s=240.0)
    for told in others:
        assert isinstance(told, Told), "a rank was never told"
        assert "_experts.py" in told.message
        assert "another rank died, hangs, or raised an error of its own" in told.message
        assert told.seconds < TIMEOUT_S + 5
    if where == "in the second round":
        assert "in round 2 of 24 in the forward pass of" in others[0].message
    if where == "with gradients of clones to return":
        assert "in the backward pass of" in others[0].message
