"""A layer of experts on one, two and three ranks computes what the whole one does."""

from __future__ import annotations

import pytest
import torch

from tests.expert_parallel.layer_cases import cases, run_cases
from tests.expert_parallel.ranks import run_ranks


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_outputs_and_all_gradients_are_those_of_the_whole(num_ranks: int) -> None:
    """One set of processes goes through all routings: starting them takes longer than the cases."""
    by_rank = run_ranks(run_cases, num_ranks, num_ranks)
    for rank, outcomes in enumerate(by_rank):
        for case in cases(num_ranks):
            outcome, where = outcomes[case.name], f"{case.name}, rank {rank}"
            assert not outcome.refusal, where
            assert len(outcome.errors) == 5, f"{where} lacks a gradient: {list(outcome.errors)}"
            tolerance = 1e-5 if case.dtype is torch.float32 else 1e-2
            assert max(outcome.errors.values()) < tolerance, f"{where}: {outcome.errors}"
            assert outcome.rounds is not None, where
            if case.axis == "rows":
                own = case.tokens[rank] * case.top_k
                assert outcome.rounds.largest <= (case.round_rows or max(case.rows, own + own // 8)), where
            if case.route == "even":
                assert (outcome.rounds.num_rounds, outcome.rounds.largest) == (1, own), f"{where}: {outcome.rounds}"
                assert outcome.num_chunks >= own // case.rows, f"{where}: a round is one chunk"
            if case.axis == "tokens" and case.route == "in turn" and num_ranks > 1:
                broken = max(by_rank[one][case.name].rounds.largest for one in range(num_ranks))
                assert broken > case.rows, f"{where}: slices kept a bound that they do not have"
            assert outcome.policy == ("nothing" if case.budget is None else "projections"), where
