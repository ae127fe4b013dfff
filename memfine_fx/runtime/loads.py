"""How uneven a region's routing has been in its latest steps, between experts and between ranks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

__all__ = ["Imbalance", "LoadHistory", "RoundStats"]

_NUM_STEPS = 512


@dataclass(frozen=True)
class Imbalance:
    """Rows of the fullest expert over the mean of all, in the latest steps: 1 is even, E is all to one expert.

    Args:
        latest: in the last step.
        p50, p95, largest: over `num_calls` calls, at most 512; each of several equal layers calls once a step.
    """

    latest: float
    p50: float
    p95: float
    largest: float
    num_calls: int

    def __str__(self) -> str:
        calls = "1 call" if self.num_calls == 1 else f"{self.num_calls} calls"
        return f"p50 {self.p50:.2f} p95 {self.p95:.2f} max {self.largest:.2f} over {calls}"


@dataclass(frozen=True)
class RoundStats:
    """A region's latest step on several ranks.

    Args:
        num_ranks: that share its experts.
        num_rounds, num_saved: exchanges of rows in forward, and how many of them were saved for backward.
        largest: rows that came to this rank in one round.
        received, busiest: rows that came to this rank in all, and to the rank with most.
        num_clones: experts that other ranks helped with, each counted for each of them.
        busiest_alone: rows that would have come to the rank with most without help.
    """

    num_ranks: int
    num_rounds: int
    num_saved: int
    largest: int
    received: int
    busiest: int
    num_clones: int = 0
    busiest_alone: int = 0

    def __str__(self) -> str:
        replicated = f", {self.busiest_alone:,} without {self.num_clones} clones" if self.num_clones else ""
        saved_text = f", {self.num_saved} of them saved" if self.num_saved else ""
        return (
            f"{self.num_ranks} ranks, {self.num_rounds} rounds of at most {self.largest:,} rows{saved_text}, "
            f"{self.received:,} rows received ({self.busiest:,} by the busiest rank{replicated})"
        )


class CopyEvent(Protocol):
    """An object that tells whether a copy to the host has arrived: a `torch.cuda.Event` recorded behind the copy."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass
class LoadHistory:
    """The largest load of each call; only one number a call is stored."""

    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_STEPS))
    _arriving: deque[tuple[torch.Tensor, CopyEvent, int | None]] = field(default_factory=deque)

    def note(self, offsets: torch.Tensor) -> None:
        """Note the routing of a step.

        Args:
            offsets: [E+1] on the host, as from `routing.sort_assignments`.
        """
        self._add(offsets.tolist())

    def note_later(self, offsets: torch.Tensor, expected_rows: int | None) -> None:
        """Note the routing of a step whose offsets are on a device, once they came: in a later step.

        Args:
            offsets: [E+1] on the device.
            expected_rows: rows that they must hold; None where assignments may be dropped.

        Raises:
            IndexError: those of an earlier step hold fewer.
        """
        self._arriving.append((*_on_its_way(offsets), expected_rows))
        self._read(waits=False)

    def _read(self, *, waits: bool) -> None:
        """Note what has come, or all that is to come."""
        while self._arriving and (waits or self._arriving[0][1].query()):
            host, event, expected_rows = self._arriving.popleft()
            event.synchronize()
            places = host.tolist()
            if expected_rows is not None and places[-1] - places[0] != expected_rows:
                raise IndexError(
                    f"expert ids outside [0, {len(places) - 1}) reached a table of {len(places) - 1} experts in an "
                    f"earlier step: {expected_rows - places[-1] + places[0]} assignments went to no expert"
                )
            self._add(places)

    def _add(self, places: Sequence[int]) -> None:
        num_rows, num_experts = places[-1] - places[0], len(places) - 1
        if num_rows:
            fullest = max(after - before for before, after in itertools.pairwise(places))
            self._ratios.append(fullest * num_experts / num_rows)

    def summary(self) -> Imbalance | None:
        """Percentiles, None before a step with rows."""
        self._read(waits=True)
        if not self._ratios:
            return None
        rising = sorted(self._ratios)
        return Imbalance(self._ratios[-1], _quantile(rising, 0.5), _quantile(rising, 0.95), rising[-1], len(rising))


def _on_its_way(offsets: torch.Tensor) -> tuple[torch.Tensor, CopyEvent]:
    """Return a copy on the host that the device will fill, and an object that tells when."""
    host = torch.empty(offsets.shape, dtype=offsets.dtype, pin_memory=True)  # into other memory the host would wait
    host.copy_(offsets, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not say
    event.record(torch.cuda.current_stream(offsets.device))
    return host, event


def _quantile(rising: list[float], share: float) -> float:
    return rising[min(len(rising) - 1, int(share * len(rising)))]
