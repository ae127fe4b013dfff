"""What every peer runs, one file a kind, from the job's seed: a step to measure, and sums of what it computed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

WEIGHT_STD = 0.02
_PROBE_PIECE = 1 << 24


@dataclass(frozen=True)
class Workload:
    """One step: forward and backward from the same inputs every time.

    Args:
        step: runs it; returns its loss or output.
        step_with_shape: the same in another (batch, sequence).
        leaves: whatever gets a gradient.
        value_of: a number that stands for what `step` returned.
        gradient_error: the largest relative error of a gradient against a reference, where there is one.
        series: further figures by layer, known without running.
        parts: the step's layers one by one, where each one's own peak is of interest.
    """

    step: Callable[[], torch.Tensor]
    step_with_shape: Callable[[int, int], torch.Tensor]
    leaves: dict[str, torch.Tensor]
    value_of: Callable[[torch.Tensor], float]
    gradient_error: Callable[[], float] | None = None
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)
    parts: tuple[Callable[[], torch.Tensor], ...] = ()

    def zero_gradients(self) -> None:
        """In place, so that the gradients' bytes exist before the step."""
        for leaf in self.leaves.values():
            if leaf.grad is not None:
                leaf.grad.zero_()

    def drop_gradients(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None

    def gradient_norm(self) -> float:
        return math.hypot(*(float(torch.linalg.vector_norm(grad)) for grad in self.gradients()))

    def gradient_checksum(self) -> float:
        """Products of unit-length gradients with a fixed probe, of order one whatever the sizes."""
        products = [normalised_product(grad) for grad in self.gradients()]
        return math.fsum(products) / math.sqrt(len(products))

    def gradients(self) -> list[torch.Tensor]:
        missing = [name for name, leaf in self.leaves.items() if leaf.grad is None]
        assert not missing, f"no gradient reached {missing}"
        return [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]


def normalised_product(tensor: torch.Tensor) -> float:
    """Of the flattened tensor at unit length with cos(0), cos(1), ...; in pieces, to need little memory."""
    total, norm = 0.0, float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
    for start, piece in enumerate(torch.split(tensor.detach().reshape(-1), _PROBE_PIECE)):
        places = torch.arange(len(piece), dtype=torch.float64, device=piece.device) + start * _PROBE_PIECE
        total += float(piece.double() @ places.cos())
    return total / max(norm, 1e-30)
