"""A layer of experts on one, two and three ranks computes what the whole one does."""

from __future__ import annotations

import pytest
import torch

from tests.expert_parallel.layer_cases import LayerCase, Outcome, cases, run_cases
from tests.expert_parallel.ranks import run_ranks

_outcomes: dict[int, list[dict[str, Outcome]]] = {}


def outcomes(num_ranks: int) -> list[dict[str, Outcome]]:
    """By rank; the processes run once and go through all cases."""
    if num_ranks not in _outcomes:
        _outcomes[num_ranks] = []  # where it fails, the other cases do not start the processes again
        _outcomes[num_ranks] = run_ranks(run_cases, num_ranks, num_ranks)
    assert _outcomes[num_ranks], "the processes failed, see the first case"
    return _outcomes[num_ranks]


@pytest.mark.parametrize("case", cases(2), ids=lambda case: case.name)
@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_outputs_and_all_gradients_are_those_of_the_whole(num_ranks: int, case: LayerCase) -> None:
    tolerance = 1e-5 if case.dtype is torch.float32 else 1e-2
    for rank, by_name in enumerate(outcomes(num_ranks)):
        outcome = by_name[case.name]
        assert not outcome.refusal
        assert len(outcome.errors) == 5, f"rank {rank} lacks a gradient: {list(outcome.errors)}"
        assert max(outcome.errors.values()) < tolerance, f"rank {rank}: {outcome.errors}"
