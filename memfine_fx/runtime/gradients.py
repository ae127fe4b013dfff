"""Gradients of the experts' parameters, written once per expert into their final place.

An expert whose rows stand in one chunk has its gradient multiplied straight into its slice. An expert split
over chunks accumulates; in low precision it does so in fp32 staging of that one expert, so that splitting
rounds no more than one matmul would. Experts without rows get zeros.

Every method either adds its whole contribution or, when memory for it cannot be had, raises having added nothing,
so that it can be called again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfine_fx.memory.products import undivided
from memfine_fx.memory.region_bytes import added_bytes
from memfine_fx.records import ParamKind

__all__ = ["ParamGradient"]


class ParamGradient:
    """The gradient of one parameter of the expert function.

    Args:
        tensors: the [E,...] table, every expert's own tensor, or the tensor that all share.
        kind: which of the three.
        wanted: whether each of `tensors` wants its gradient; the others are not computed into.
        in_fp32: whether all of it stands in fp32 at least, because others are to be added to it.
        onto: existing gradients of some of `tensors`, which are added to in place; None for those to be allocated.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        kind: ParamKind,
        wanted: Sequence[bool],
        *,
        in_fp32: bool = False,
        onto: Sequence[torch.Tensor | None] = (),
    ) -> None:
        onto = onto or [None] * len(tensors)
        fp32 = torch.float32
        self._values = [
            torch.empty_like(tensor, dtype=torch.promote_types(tensor.dtype, fp32) if in_fp32 else None)
            if existing is None and is_wanted
            else existing
            for tensor, is_wanted, existing in zip(tensors, wanted, onto, strict=True)
        ]
        self._kind = kind
        # Where a gradient is there already its entries count as written, so that products are added and never set.
        is_there = [gradient is not None for gradient in onto]
        self._written = is_there * tensors[0].shape[0] if kind == "expert" else is_there
        self._item_bytes = tensors[0].element_size()
        self._is_low_precision = tensors[0].dtype in (torch.bfloat16, torch.float16) and not in_fp32
        self._device_type = tensors[0].device.type
        self._staging: dict[int, torch.Tensor] = {}

    def add_product(self, expert: int, left: torch.Tensor, right: torch.Tensor, *, is_part: bool) -> None:
        """Add left [a,R] @ right [R,b] to an expert's gradient."""
        slot, place = self._slot(expert)
        if place is None:
            return
        is_staged = self._needs_staging(is_part)
        if not is_staged and place.dtype == left.dtype and place.stride(0) == 1:
            # A product into columns is turned round by ATen itself; so `undivided` sees the factor that is packed.
            left, right, place = right.t(), left.t(), place.t()
        left = undivided(left, right)
        if is_staged:
            self._stage(slot, torch.mm(left, right))
        elif place.dtype != left.dtype:
            self._add(slot, place, torch.mm(left, right))
        elif self._written[slot]:
            place.addmm_(left, right)
        else:
            torch.mm(left, right, out=place)
        self._written[slot] = True

    def add_tensor(self, expert: int, gradient: torch.Tensor, *, is_part: bool) -> None:
        """Add a ready gradient to an expert's gradient."""
        slot, place = self._slot(expert)
        if place is None:
            return
        if self._needs_staging(is_part):
            self._stage(slot, gradient)
        else:
            self._add(slot, place, gradient)
        self._written[slot] = True

    def _add(self, slot: int, place: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._written[slot]:
            place.add_(gradient)
        else:
            place.copy_(gradient)

    def add_range(self, first_expert: int, gradients: torch.Tensor) -> None:
        """Add the gradients [G,...] of whole experts from `first_expert` on, which have none yet or all have one."""
        last = first_expert + gradients.shape[0]
        (table,) = self._values
        assert table is not None, "a table whose gradient is not wanted has no ParamGradient"
        self._add(first_expert, table[first_expert:last], gradients)
        self._written[first_expert:last] = [True] * gradients.shape[0]

    @property
    def staged_bytes(self) -> int:
        """Most bytes that adding to one expert may take: its fp32 staging and the product being added."""
        if not self._is_low_precision:
            return 0
        elements = max((value.numel() for value in self._values if value is not None), default=0)
        elements //= len(self._written) if self._kind == "expert" else 1
        return 4 * elements + added_bytes(elements, self._item_bytes, self._device_type)

    def finish(self, expert: int) -> None:
        """Write an expert's staged gradient to its place; nothing more will be added to it."""
        if self._kind == "shared":
            return
        self._write_staged(expert)

    def _write_staged(self, expert: int) -> None:
        slot, place = self._slot(expert)
        staged = self._staging.get(slot)
        if staged is not None and place is not None:
            place.copy_(staged)
            del self._staging[slot]

    def finish_all(self) -> list[torch.Tensor]:
        """The complete gradients of the wanted tensors."""
        for slot in list(self._staging):
            self._write_staged(slot)
        for slot, is_written in enumerate(self._written):
            place = self._slot(slot)[1]
            if not is_written and place is not None:
                place.zero_()
        return [value for value in self._values if value is not None]

    def _slot(self, expert: int) -> tuple[int, torch.Tensor | None]:
        if self._kind == "each":
            return expert, self._values[expert]
        (value,) = self._values
        if self._kind == "shared" or value is None:
            return 0, value
        return expert, value[expert]

    def _needs_staging(self, is_part: bool) -> bool:
        return self._is_low_precision and (is_part or self._kind == "shared")

    def _stage(self, slot: int, gradient: torch.Tensor) -> None:
        staged = self._staging.get(slot)
        if staged is not None:
            staged.add_(gradient)
            return
        staged = gradient.to(torch.float32)
        place = self._slot(slot)[1]
        if self._written[slot] and place is not None:
            staged.add_(place)
        self._staging[slot] = staged
