"""The interface between the op pair and a region whose experts are sharded over ranks.

`memfine_fx.expert_parallel` implements it; the runtime only calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from memfine_fx.runtime.routed import Routed

if TYPE_CHECKING:
    from memfine_fx.runtime.loop import SavedRows
    from memfine_fx.runtime.store import LiveRegion

__all__ = ["RowExchange"]


class RowExchange(Protocol):
    """Experts of one region that live on several ranks."""

    @property
    def table_shape(self) -> tuple[int, int]:
        """Return the shape of the gathered counts that stand in the place of offsets."""
        ...

    def share_counts(
        self, region: LiveRegion, order: torch.Tensor, offsets: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        """Every rank's counts, and what goes with them; a collective call.

        Raises:
            IndexError: see `LiveRegion.check_ids`; the other ranks raise an error, too.
        """
        ...

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a rank receives."""
        ...

    def room(self, hidden: torch.Tensor, weight: torch.Tensor | None, num_rows: int) -> list[torch.Tensor]:
        """Return tensors for `num_rows` rows that come and are saved for backward."""
        ...

    def forward(self, region: LiveRegion, routed: Routed, saved: SavedRows | None) -> torch.Tensor:
        """[T,H_out], of this rank's tokens; what was gathered stands in the place of the offsets.

        Args:
            saved: tensors of `room`, and what the bodies save, if anything is saved.
        """
        ...

    def backward(
        self,
        region: LiveRegion,
        grad: torch.Tensor,
        routed: Routed,
        wanted: tuple[bool, bool],
        wanted_params: Sequence[Sequence[bool]],
        saved: SavedRows | None,
    ) -> list[torch.Tensor]:
        """Gradients of what is wanted, in the order hidden, weight, parameters."""
        ...
