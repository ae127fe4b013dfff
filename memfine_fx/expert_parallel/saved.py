"""Save the received rows of a layer's first rounds from forward to backward, so that they are not sent again.

The first rounds are saved, as many as every rank has room for: a rank has room for as many rows as it has routed rows
of its own, which is what comes to it under even routing. So the bytes do not follow the skew. Rows of later rounds
travel again. Every rank knows every rank's room from the gathered table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfine_fx.expert_parallel.all_to_all import Packing
from memfine_fx.runtime.bodies import SavingBodies
from memfine_fx.runtime.loop import SavedRows

__all__ = ["SavedRounds"]


@dataclass(frozen=True)
class SavedRounds:
    """The saved tensors of the first rounds of one layer in one step.

    Args:
        num_rounds: how many rounds are saved.
        packing: column layout of the received rows and weights.
        arrived: [N,...] receive buffers of rows and weights, in the order in which they were received.
        bodies: compiled expert functions that save tensors of their own, see `runtime.bodies`; None if they do not.
        values: [N,...] the tensors that these save, in expert order within a round.
    """

    num_rounds: int
    packing: Packing
    arrived: Sequence[torch.Tensor]
    bodies: SavingBodies | None
    values: Sequence[torch.Tensor]

    @staticmethod
    def of(saved: SavedRows | None, num_rounds: int, packing: Packing, like: torch.Tensor) -> SavedRounds:
        """Return the saved rounds in the op's tensors: buffers of `packing`, then tensors of the expert functions.

        A rank that saves nothing takes part where it receives no row in the rounds that others save.
        """
        if saved is None:
            return SavedRounds(num_rounds, packing, packing.buffers(0, like), None, ())
        num_values = len(saved.bodies.saved)
        num_buffers = len(saved.tensors) - num_values
        return SavedRounds(num_rounds, packing, saved.tensors[:num_buffers], saved.bodies, saved.tensors[num_buffers:])

    def holds(self, number: int) -> bool:
        return number < self.num_rounds

    def inboxes(self, begin: int, num_rows: int) -> list[torch.Tensor]:
        """Return the buffers that receive a round's rows and hold them until backward."""
        assert begin + num_rows <= self.arrived[0].shape[0], "a round is saved for which this rank has no room"
        return [buffer[begin : begin + num_rows] for buffer in self.arrived]

    def rows(self, begin: int, num_rows: int) -> list[torch.Tensor]:
        """Return the columns of a round's received rows."""
        return self.packing.views(self.inboxes(begin, num_rows))

    def values_of(self, begin: int, num_rows: int) -> SavedRows | None:
        """Return the tensors that the expert functions save of a round; None if they save none."""
        return (
            None
            if self.bodies is None
            else SavedRows(self.bodies, [value[begin : begin + num_rows] for value in self.values])
        )
