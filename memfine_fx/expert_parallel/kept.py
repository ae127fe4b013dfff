"""What a layer keeps of the rounds of its forward, so that backward need not ask for it again.

The first rounds are kept, as many as every rank has room for: a rank has room for as many rows as it has routed rows
of its own, which is what comes to it under even routing. So the bytes do not follow the skew. Rows of later rounds
travel again. Every rank knows every rank's room from the gathered table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfine_fx.expert_parallel.packing import Packing
from memfine_fx.runtime.bodies import KeepingBodies
from memfine_fx.runtime.loop import Kept

__all__ = ["KeptRounds"]


@dataclass(frozen=True)
class KeptRounds:
    """Room for the first rounds of one layer in one step.

    Args:
        num_rounds: that are kept.
        packing: of the rows and weights that came.
        arrived: [N,...] as they came.
        bodies: what keeps something of its own, see `runtime.bodies`.
        values: [N,...] of that, in expert order within a round.
    """

    num_rounds: int
    packing: Packing
    arrived: Sequence[torch.Tensor]
    bodies: KeepingBodies | None
    values: Sequence[torch.Tensor]

    @staticmethod
    def of(kept: Kept | None, num_rounds: int, packing: Packing, like: torch.Tensor) -> KeptRounds:
        """What the op gave room for: buffers of `packing` first, then what the bodies keep.

        A rank that keeps nothing takes part where no row comes to it in the rounds that others keep.
        """
        if kept is None:
            return KeptRounds(num_rounds, packing, packing.buffers(0, like), None, ())
        num_values = len(kept.bodies.kept)
        num_buffers = len(kept.tensors) - num_values
        return KeptRounds(num_rounds, packing, kept.tensors[:num_buffers], kept.bodies, kept.tensors[num_buffers:])

    def holds(self, number: int) -> bool:
        return number < self.num_rounds

    def inboxes(self, begin: int, num_rows: int) -> list[torch.Tensor]:
        """Where a round's rows come to, and lie in backward."""
        assert begin + num_rows <= self.arrived[0].shape[0], "a round is kept for which this rank has no room"
        return [buffer[begin : begin + num_rows] for buffer in self.arrived]

    def rows(self, begin: int, num_rows: int) -> list[torch.Tensor]:
        """Columns of what came."""
        return self.packing.views(self.inboxes(begin, num_rows))

    def values_of(self, begin: int, num_rows: int) -> Kept | None:
        """What the bodies of a round keep."""
        return (
            None
            if self.bodies is None
            else Kept(self.bodies, [value[begin : begin + num_rows] for value in self.values])
        )
