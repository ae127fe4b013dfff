"""What is kept of the rows that came: as much as the budget allows, sent once, within the room of every rank."""

from __future__ import annotations

import pytest

from tests.expert_parallel.ranks import run_ranks
from tests.expert_parallel.saved_cases import BUDGETS, ROWS, TOKENS, TOP_K, Sent, run_saved


@pytest.mark.slow
def test_rows_that_fit_are_kept_and_do_not_travel_again() -> None:
    by_rank: list[dict[tuple[str, str], Sent]] = run_ranks(run_saved, 2, 2)
    ample, tight, least = BUDGETS
    for rank, found in enumerate(by_rank):
        for (budget, route), one in found.items():
            where = f"{budget}, {route}, rank {rank}"
            assert max(one.outcome.errors.values()) < 1e-5, f"{where}: {one.outcome.errors}"
            rounds = one.outcome.rounds
            assert rounds is not None and rounds.largest <= ROWS, where
            assert rounds.num_saved * ROWS <= TOKENS * TOP_K, f"{where}: kept beyond this rank's own rows"
    policies = [{budget: found[budget, "random"].outcome.policy for budget in BUDGETS} for found in by_rank]
    assert policies[0] == {ample: "projections", tight: "received", least: "nothing"}
    sent = {budget: sum(found[budget, "random"].num_bytes for found in by_rank) for budget in BUDGETS}
    assert sent[ample] == sent[tight] < sent[least]
