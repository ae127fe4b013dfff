"""Functional tensors of `torch.func`, the tensors behind them, the calls that reach the dispatcher, and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfine_fx.compat.checks import expect

__all__ = ["Listening", "Writes", "check_functional_tensors", "functional_value"]


class Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function after every call that reaches the dispatcher.

    Args:
        tell: called with the overload, its arguments by position and by name, and the result. What it returns, unless
            that is None, takes the result's place.
    """

    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        replacement = self._tell(func, args, kwargs or {}, out)
        return out if replacement is None else replacement


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is in each tensor that is written in place, before its first write, whoever owns it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    self._note(tensor)
        return func(*args, **kwargs)

    def _note(self, tensor: Any) -> None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._before:
            # Bytes of a storage have no version, which a graph of the user's may have saved.
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._before[storage.data_ptr()] = memory, memory.clone()

    def restore(self) -> None:
        """Write back what was noted, and forget it."""
        for memory, before in self._before.values():
            if not torch.equal(memory, before):
                memory.copy_(before)
        self._before.clear()


def functional_value(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind a functional tensor, after all writes so far; any other tensor as it is.

    It is the very object that the last operation gave, so that values can be compared by identity.
    """
    if not torch._C._functorch.is_functionaltensor(tensor):
        return tensor
    synchronize: Any = getattr(torch, "_sync")  # noqa: B009  # untyped
    synchronize(tensor)
    return torch._C._functorch._unwrap_functional_tensor(tensor, True)


def check_functional_tensors() -> None:
    plain = torch.zeros(3)
    inside: list[bool] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        inside.append(functional_value(tensor) is plain)
        view = tensor[:1]
        tensor.add_(1.0)
        inside.append(functional_value(tensor) is not plain and functional_value(tensor) is functional_value(tensor))
        inside.append(bool(functional_value(view) == 1.0))
        return view

    calls: list[str] = []
    with Listening(lambda target, args, kwargs, out: calls.append(str(target))):
        torch.func.functionalize(look, remove="mutations")(plain)
    expect(
        "aten.add.Tensor" in calls and "aten.add_.Tensor" not in calls[: calls.index("aten.add.Tensor")],
        f"the calls are {calls}",
    )
    expect(inside == [True, True, True], f"functional tensors are {inside}")
    expect(functional_value(plain) is plain, "a plain tensor is not itself")
