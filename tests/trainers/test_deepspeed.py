"""ZeRO stages 1 to 3 on two CPU processes, where DeepSpeed is installed."""

from __future__ import annotations

import pytest

from tests.expert_parallel.ranks import run_ranks

pytest.importorskip("transformers")


@pytest.mark.trainers
@pytest.mark.parametrize("optimizes", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_to_the_same_losses(stage: int, optimizes: bool) -> None:
    pytest.importorskip("deepspeed")
    from tests.trainers.deepspeed_cases import zero_run

    for plain, ours, num_chunked in run_ranks(zero_run, 2, stage, optimizes, timeout_s=400):
        assert ours == pytest.approx(plain, rel=1e-5)
        assert num_chunked >= 1
