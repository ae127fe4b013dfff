"""Training over many steps of changing routing on ranks at different paces is that of one process."""

from __future__ import annotations

import pytest

from tests.expert_parallel.ranks import run_ranks
from tests.expert_parallel.soak_cases import ROUTES, Soak, soak


def check(by_rank: list[Soak], slots: int) -> None:
    for rank, one in enumerate(by_rank):
        assert one.loss < 1e-10, f"rank {rank}: a loss is off by {one.loss:.1e}"
        assert one.parameters < 1e-10, f"rank {rank}: a parameter is off by {one.parameters:.1e}"
        assert set(ROUTES) <= one.routes.keys(), f"routing that never came: {one.routes}"
        assert (one.clones > 0) == (slots > 0), f"{one.clones} clones"
        assert one.most_rounds > 1, "rounds were never more than one"


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 2])
def test_hundreds_of_steps_lose_as_one_process_does(slots: int) -> None:
    by_rank: list[Soak] = run_ranks(soak, 3, 3, 250, slots)
    check(by_rank, slots)
    assert "tokens: none" in by_rank[0].routes and "tokens: none on one rank" in by_rank[0].routes
    assert by_rank[0].last_loss != by_rank[0].first_loss


@pytest.mark.slow
def test_eight_ranks_on_one_machine_lose_as_one_process_does() -> None:
    check(run_ranks(soak, 8, 8, 20, 2), 2)
