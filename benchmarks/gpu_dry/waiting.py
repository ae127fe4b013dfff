"""Operators that wait for a device, noted while code runs on tensors that hold nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Waiting"]

aten = torch.ops.aten
_READS_VALUES = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default, aten.bincount.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)


class Waiting(TorchDispatchMode):
    """Notes the operators that read values, and copies between a device and the host that block.

    Args:
        sees_numbers: whether tensors made of numbers are noted too, for which torch.compile would trace this mode.
    """

    def __init__(self, *, sees_numbers: bool = True) -> None:
        super().__init__()
        self.found: list[str] = []
        self._from_numbers = _FromNumbers(self.found) if sees_numbers else contextlib.nullcontext()

    supports_higher_order_operators = True  # the random state of what is recomputed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs under this mode; its compilation does not."""
        return True

    def __enter__(self) -> Waiting:
        self._from_numbers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._from_numbers.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        crosses = len({tensor.device.type for tensor in tensors}) > 1
        blocks = not (kwargs or {}).get("non_blocking", False) or result.device.type == "cpu"
        reads = func in _READS_VALUES and any(tensor.device.type != "cpu" for tensor in tensors)
        if reads or (crosses and blocks):
            self.found.append(str(func))
        return result


class _FromNumbers(TorchFunctionMode):
    """Notes tensors made on a device of numbers on the host: their copy blocks and is no operator of its own."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FROM_NUMBERS and result.device.type != "cpu":
            self._found.append(func.__name__)
        return result
