"""Index arrays of a walk, as they are found on a CPU and as they would be copied to an accelerator."""

from __future__ import annotations

import pytest
import torch

from memfine_fx.expert_parallel import places
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.places import WalkPlaces
from memfine_fx.expert_parallel.schedule import Rounds


@pytest.mark.parametrize("is_copied", [False, True])
def test_rows_leave_by_expert_and_come_in_the_order_of_experts(is_copied: bool) -> None:
    counts = torch.tensor([[3, 0, 2, 1], [1, 4, 0, 2]])
    schedule = Rounds(counts, Placement(4, 2), 4, 2)
    rounds = [schedule.legs(1, number) for number in range(schedule.num_rounds)]
    begins = counts[1].cumsum(0) - counts[1]
    found = WalkPlaces(rounds, begins, torch.device("cpu"))
    if is_copied:
        found._moved = places._moved([found._ranges_of(number) for number in range(len(rounds))], torch.device("cpu"))
    sent = [found.sent(number, leg) for number, legs in enumerate(rounds) for leg in range(len(legs))]
    assert sorted(torch.cat(sent).tolist()) == list(range(int(counts[1].sum())))
    for number, legs in enumerate(rounds):
        owners = torch.cat([torch.repeat_interleave(torch.arange(2).repeat(2), leg.received.flatten()) for leg in legs])
        assert owners[found.order(number).long()].tolist() == sorted(owners.tolist())
