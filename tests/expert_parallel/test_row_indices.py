"""Index arrays of a layer's rounds, as they are found on a CPU and as they would be copied to an accelerator."""

from __future__ import annotations

import pytest
import torch

from memfine_fx.expert_parallel import all_to_all
from memfine_fx.expert_parallel.all_to_all import RowIndices
from memfine_fx.expert_parallel.placement import Placement
from memfine_fx.expert_parallel.schedule import Rounds


@pytest.mark.parametrize("is_copied", [False, True])
def test_rows_leave_by_expert_and_come_in_the_order_of_experts(is_copied: bool) -> None:
    counts = torch.tensor([[3, 0, 2, 1], [1, 4, 0, 2]])
    schedule = Rounds(counts, Placement(4, 2), 4, 2)
    rounds = [schedule.all_to_alls(1, number) for number in range(schedule.num_rounds)]
    begins = counts[1].cumsum(0) - counts[1]
    found = RowIndices(rounds, begins, torch.device("cpu"))
    if is_copied:
        found._moved = all_to_all._moved(
            [found._ranges_of(number) for number in range(len(rounds))], torch.device("cpu")
        )
    sent = [found.sent(number, index) for number, all_to_alls in enumerate(rounds) for index in range(len(all_to_alls))]
    assert sorted(torch.cat(sent).tolist()) == list(range(int(counts[1].sum())))
    for number, all_to_alls in enumerate(rounds):
        owners = torch.cat(
            [torch.repeat_interleave(torch.arange(2).repeat(2), a2a.received.flatten()) for a2a in all_to_alls]
        )
        assert owners[found.order(number).long()].tolist() == sorted(owners.tolist())
