"""A rank that dies, hangs or runs something else is named to the others, in time."""

from __future__ import annotations

import pytest

from tests.expert_parallel.fault_cases import ROWS, Told, differing, leaving
from tests.expert_parallel.ranks import run_ranks

TIMEOUT_S = 6.0


def test_ranks_that_differ_are_told_in_what() -> None:
    for told in run_ranks(differing, 2):
        assert told["config"] == (
            "ranks of the expert parallel group differ: "
            f"Config.rows_per_chunk is {ROWS} on rank 0 and {ROWS + 1} on rank 1"
        )
        assert "parameter gate_up_proj is [4, 24, 8] torch.float32, sharded on rank 0 and [5, 24, 8]" in told["model"]
        assert "ranks [1] run something else than rank 0 in the counting pass of" in told["layer"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_leaves_is_an_error_with_layer_and_round(how: str) -> None:
    told = run_ranks(leaving, 2, how, timeout_s=TIMEOUT_S, limit_s=60.0)[0]
    assert isinstance(told, Told)
    assert "in round 2 of 16 in the forward pass of" in told.message and "_experts.py" in told.message
    assert "another rank died, hangs, or raised an error of its own" in told.message
    assert told.seconds < TIMEOUT_S + 5
