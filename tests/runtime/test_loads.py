"""How uneven routing was: counts that are on the host, and counts that come from a device a step later."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from memfine_fx.runtime import loads
from memfine_fx.runtime.loads import LoadHistory


@dataclass
class Copy:
    """A copy that is there when it is said to be, or waited for."""

    is_there: bool = False
    num_waits: int = 0

    def query(self) -> bool:
        return self.is_there

    def synchronize(self) -> None:
        self.is_there = True
        self.num_waits += 1


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    """Those on their way, in the order of the steps."""
    found: list[Copy] = []

    def on_its_way(offsets: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        found.append(Copy())
        return offsets, found[-1]

    monkeypatch.setattr(loads, "_on_its_way", on_its_way)
    return found


def test_counts_of_a_device_are_read_once_they_came(copies: list[Copy]) -> None:
    history = LoadHistory()
    history.note_later(torch.tensor([0, 4, 4]), 4)
    history.note_later(torch.tensor([0, 2, 4]), 4)
    assert [copy.num_waits for copy in copies] == [0, 0] and len(history._arriving) == 2
    copies[0].is_there = True
    history.note_later(torch.tensor([0, 3, 4]), 4)
    assert list(history._ratios) == [2.0]
    summary = history.summary()  # a report waits for the others
    assert summary is not None and (summary.latest, summary.num_calls) == (1.5, 3)


def test_an_id_of_no_expert_is_an_error_of_a_later_step(copies: list[Copy]) -> None:
    history = LoadHistory()
    history.note_later(torch.tensor([0, 2, 3]), None)  # some may be dropped
    history.note_later(torch.tensor([0, 2, 3]), 4)
    for copy in copies:
        copy.is_there = True
    with pytest.raises(IndexError, match=r"outside \[0, 2\) .* earlier step: 1 assignments"):
        history.note_later(torch.tensor([0, 2, 4]), 4)
    assert list(history._ratios) == [2 * 2 / 3]
