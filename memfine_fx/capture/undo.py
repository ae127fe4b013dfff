"""What running a model changes besides its result, and putting it back.

Generators of random numbers (torch's on the host and on the accelerator, Python's, numpy's), the attributes of modules
one level deep (buffers and hooks among them), and the contents of buffers and other named tensors. What an attribute's
own object changes inside itself (a list that grows) is not seen.

NOTE: contents are written back only where they differ. Writing moves a tensor's version, and a graph of the user that
saved an unchanged buffer would refuse its backward. The version alone does not tell what differs: batch norm writes its
running statistics without moving it.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from memfine_fx.compat.nn import own_buffers

__all__ = ["Contents", "Generators", "ModelState"]


class Generators:
    """The state of torch's generators, the host's and the accelerator's."""

    def __init__(self) -> None:
        # A tensor of 5,056 bytes would live as long as a call that may have to be undone, and in no plan.
        state = torch.get_rng_state()
        self._host = ctypes.string_at(state.data_ptr(), state.nbytes)
        self._device = _device_generators()

    def restore(self) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(self._host), dtype=torch.uint8))
        if self._device is not None:
            put_back, state = self._device
            put_back(state)


def _device_generators() -> tuple[Callable[[Any], object], Any] | None:
    """How to put the accelerator's generators back, and their state; None where it has not been used yet."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    module: Any = None if accelerator is None else torch.get_device_module(accelerator)
    if module is None or not getattr(module, "is_initialized", lambda: True)():
        return None
    if hasattr(module, "get_rng_state_all"):
        return module.set_rng_state_all, module.get_rng_state_all()
    return module.set_rng_state, module.get_rng_state()


class _HostGenerators:
    """Python's generator, and numpy's where it is loaded."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        self._numpy_state = None if self._numpy is None else self._numpy.get_state()

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy_state is not None:
            self._numpy.set_state(self._numpy_state)


class Contents:
    """What is in some tensors.

    Args:
        tensors: copied now.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, before in self._differing():
                with torch.inference_mode(tensor.is_inference()):
                    tensor.copy_(before)

    def changed(self) -> list[torch.Tensor]:
        """Tensors that were written to since, or may have been."""
        return [tensor for tensor, _ in self._differing()]

    def _differing(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(tensor, before) for tensor, before in self._kept if not _has_same_bits(tensor, before)]


def _has_same_bits(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """False where that cannot be asked: a tensor without data, or one that is spread over ranks."""
    if type(before) is not torch.Tensor or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return torch.equal(*(one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (tensor, before)))


class ModelState:
    """What a call of a model may change, as it is now.

    Args:
        model: with all its modules.
        tensors: further tensors that the call may write into, its inputs.
        attributes: which of the modules': "all", or only those that are "buffers". What a model sets up once, in its
            first call, must not be taken from a call that runs again at once.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: Iterable[torch.Tensor] = (),
        *,
        attributes: Literal["all", "buffers"] = "all",
    ) -> None:
        self._generators, self._host_generators = Generators(), _HostGenerators()
        dicts: list[dict[Any, Any]] = [own_buffers(module) for module in model.modules()]
        if attributes == "all":
            own = [vars(module) for module in model.modules()]
            dicts = own + [value for values in own for value in values.values() if isinstance(value, dict)]
        self._dicts = [(entries, dict(entries)) for entries in dicts]
        self._contents = Contents([*model.buffers(), *tensors])

    def restore(self) -> None:
        for entries, before in self._dicts:
            is_same = list(entries) == list(before) and all(entries[key] is value for key, value in before.items())
            if not is_same:
                entries.clear()
                entries.update(before)
        self._contents.restore()
        self._host_generators.restore()
        self._generators.restore()

    def changed(self) -> list[torch.Tensor]:
        """Buffers and named tensors that were written to since, or may have been."""
        return self._contents.changed()
