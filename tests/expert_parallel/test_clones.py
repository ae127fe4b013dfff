"""How the weights of a clone travel: as one expert's numbers, whatever lies between them in the table."""

from __future__ import annotations

import pytest
import torch

from memfine_fx.expert_parallel.clones import _flat, _table_like

ROWS, COLUMNS, EXPERTS = 5, 4, 3


@pytest.mark.parametrize(
    "table",
    [
        torch.arange(60.0).view(EXPERTS, ROWS, COLUMNS),
        torch.arange(60.0).view(EXPERTS, COLUMNS, ROWS).transpose(1, 2),
        torch.arange(60.0).view(ROWS, COLUMNS, EXPERTS).permute(2, 0, 1),
        torch.arange(60.0).view(EXPERTS, COLUMNS, ROWS)[:, :, :1].transpose(1, 2),
    ],
    ids=["rows", "columns", "experts turn by turn", "parts of rows"],
)
def test_an_expert_reaches_its_slot_number_by_number(table: torch.Tensor) -> None:
    slots = _table_like(table, 2)
    assert slots.shape == (2, *table.shape[1:])
    for expert in range(EXPERTS):
        sent, place = _flat(table[expert]), _flat(slots[1])
        assert sent.is_contiguous() and place.data_ptr() == slots[1].data_ptr()
        place.copy_(sent)
        assert torch.equal(slots[1], table[expert])
