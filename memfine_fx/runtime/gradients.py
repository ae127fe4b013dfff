"""Gradients of the experts' parameters, written once per expert into their final place.

An expert whose rows stand in one chunk has its gradient multiplied straight into its slice. An expert split
over chunks accumulates; in low precision it does so in fp32 staging of that one expert, so that splitting
rounds no more than one matmul would. Experts without rows get zeros.

Every method either adds its whole contribution or, when memory for it cannot be had, raises having added nothing,
so that it can be called again.
"""

from __future__ import annotations

import torch

from memfine_fx.records import ParamKind

__all__ = ["ParamGradient"]


class ParamGradient:
    """The gradient of one parameter of the expert function.

    Args:
        param: [E,...] table, or the whole tensor of a shared parameter.
        kind: which of the two.
    """

    def __init__(self, param: torch.Tensor, kind: ParamKind) -> None:
        self.value = torch.empty_like(param)
        self._kind = kind
        self._num_slots = param.shape[0] if kind == "expert" else 1
        self._written = [False] * self._num_slots
        self._is_low_precision = param.dtype in (torch.bfloat16, torch.float16)
        self._staging: dict[int, torch.Tensor] = {}

    def add_product(self, expert: int, left: torch.Tensor, right: torch.Tensor, *, is_part: bool) -> None:
        """Add left [a,R] @ right [R,b] to an expert's gradient."""
        slot, place = self._slot(expert)
        if self._needs_staging(is_part):
            self._stage(slot, torch.mm(left, right))
        elif self._written[slot]:
            place.addmm_(left, right)
        else:
            torch.mm(left, right, out=place)
        self._written[slot] = True

    def add_tensor(self, expert: int, gradient: torch.Tensor, *, is_part: bool) -> None:
        """Add a ready gradient to an expert's gradient."""
        slot, place = self._slot(expert)
        if self._needs_staging(is_part):
            self._stage(slot, gradient)
        elif self._written[slot]:
            place.add_(gradient)
        else:
            place.copy_(gradient)
        self._written[slot] = True

    def set_range(self, first_expert: int, gradients: torch.Tensor) -> None:
        """Set the gradients [G,...] of whole experts from `first_expert` on."""
        last = first_expert + gradients.shape[0]
        self.value[first_expert:last].copy_(gradients)
        self._written[first_expert:last] = [True] * gradients.shape[0]

    @property
    def staged_bytes(self) -> int:
        """Most bytes that adding to one expert may take: its fp32 staging and the product being added."""
        elements = self.value.numel() // self._num_slots if self._num_slots else 0
        return elements * (4 + self.value.element_size()) if self._is_low_precision else 0

    def finish(self, expert: int) -> None:
        """Write an expert's staged gradient to its place; nothing more will be added to it."""
        if self._kind == "shared":
            return
        self._write_staged(expert)

    def _write_staged(self, expert: int) -> None:
        slot, place = self._slot(expert)
        staged = self._staging.get(slot)
        if staged is not None:
            place.copy_(staged)
            del self._staging[slot]

    def finish_all(self) -> torch.Tensor:
        """The complete gradient."""
        for slot in list(self._staging):
            self._write_staged(slot)
        for slot, is_written in enumerate(self._written):
            if not is_written:
                self._slot(slot)[1].zero_()
        return self.value

    def _slot(self, expert: int) -> tuple[int, torch.Tensor]:
        return (expert, self.value[expert]) if self._kind == "expert" else (0, self.value)

    def _needs_staging(self, is_part: bool) -> bool:
        return self._is_low_precision and (is_part or self._kind == "shared")

    def _stage(self, slot: int, gradient: torch.Tensor) -> None:
        staged = self._staging.get(slot)
        if staged is None:
            self._staging[slot] = gradient.to(torch.float32)
        else:
            staged.add_(gradient)
