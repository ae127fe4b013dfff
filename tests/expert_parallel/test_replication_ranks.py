"""Clones of hot experts with frozen experts, accumulation, checkpointing, adapters and kept rows."""

from __future__ import annotations

import pytest

from tests.expert_parallel.ranks import run_ranks
from tests.expert_parallel.replication_cases import ReplicationOutcome, cases, run_replication


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_help_changes_no_gradient_whatever_else_a_step_is(num_ranks: int) -> None:
    by_rank: list[dict[str, ReplicationOutcome]] = run_ranks(run_replication, num_ranks, num_ranks)
    for case in cases(num_ranks):
        outcomes = [found[case.name] for found in by_rank]
        for rank, one in enumerate(outcomes):
            where = f"{case.name}, rank {rank}"
            assert not one.refusal, f"{where}: {one.refusal}"
            assert max(one.errors.values()) < 1e-5, f"{where}: {one.errors}"
            assert one.is_repeatable, f"{where}: another run has other bits"
            assert one.num_clones > 0, f"{where}: nobody helps"
            if case.batches == 1:  # a rank without tokens keeps nothing
                assert one.policy == ("nothing" if case.budget is None else "projections"), where
        num_returned = sum(one.num_returned for one in outcomes)
        assert (num_returned > 0) == (case.num_sent_back > 0), f"{case.name}: {num_returned} gradients of clones"
        if case.batches == 1:
            assert num_returned == case.num_sent_back * outcomes[0].num_clones, case.name
