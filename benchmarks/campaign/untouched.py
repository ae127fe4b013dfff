"""Everything of a model and of the process that a call of memfine_fx must leave as it was, bit by bit."""

from __future__ import annotations

import gc
import importlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.fx.experimental._config",
)
_PARAMETER = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def untouched(
    model: torch.nn.Module, inputs: Sequence[torch.Tensor] = (), *, besides: Sequence[str] = ()
) -> Iterator[None]:
    """Assert on leaving, by an exception too, that nothing changed.

    Args:
        model: with all its modules, parameters, buffers and their hooks.
        inputs: tensors that were handed in.
        besides: beginnings of names that may change.
    """
    before = state_of(model, inputs)
    try:
        yield
    finally:
        found = changes(before, state_of(model, inputs))
        assert not [name for name in found if not name.startswith(tuple(besides))], found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs."""
    return [name for name in before | after if not _is_same(before.get(name), after.get(name))]


def state_of(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    return dict([*_of_model(model), *_of_inputs(inputs), *_of_process()])


def _of_model(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            yield f"attribute {path}.{name}", _Same(value)
            if isinstance(value, dict):
                yield f"entries {path}.{name}", [(key, _Same(entry)) for key, entry in value.items()]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"parameter {name}", _Bits(parameter)
        for attribute in _PARAMETER:
            value = getattr(parameter, attribute)
            yield f"{attribute} of {name}", dict(value) if isinstance(value, dict) else _Same(value)
        if parameter.grad is not None:
            yield f"bits of grad of {name}", _Bits(parameter.grad)
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", _Bits(buffer)


def _of_inputs(inputs: Sequence[torch.Tensor]) -> Iterator[tuple[str, Any]]:
    for number, tensor in enumerate(inputs):
        yield f"input {number}", _Bits(tensor)
        if tensor.is_leaf:
            yield f"grad of input {number}", None if tensor.grad is None else (_Same(tensor.grad), _Bits(tensor.grad))


def _of_process() -> Iterator[tuple[str, Any]]:
    yield "generator of torch", _Bits(torch.get_rng_state())
    if torch.cuda.is_initialized():
        yield "generators of cuda", [_Bits(state) for state in torch.cuda.get_rng_state_all()]
    yield "generator of python", random.getstate()
    if "numpy" in sys.modules:
        yield "generator of numpy", str(sys.modules["numpy"].random.get_state())
    for name in _CONFIGS:
        for option, value in importlib.import_module(name).get_config_copy().items():  # type: ignore[attr-defined]
            yield f"{name}.{option}", value
    yield "grad mode", torch.is_grad_enabled()
    yield "inference mode", torch.is_inference_mode_enabled()
    yield "autocast", torch.is_autocast_enabled("cpu")
    yield "default dtype", torch.get_default_dtype()
    yield "dispatch modes", len(_get_current_dispatch_mode_stack())
    yield "functorch", torch._C._functorch.peek_interpreter_stack() is None
    yield "importers", [_Same(finder) for finder in sys.meta_path]
    yield "garbage collection", gc.isenabled()


class _Same:
    """The very object; numbers and text by value."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        is_plain = isinstance(self.value, (bool, int, float, str, tuple, type(None)))
        return self.value is other.value or (is_plain and self.value == other.value)

    __hash__ = None  # type: ignore[assignment]


class _Bits:
    """What is in a tensor; two that are not a number are equal."""

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach().clone().contiguous().reshape(-1)
        self.layout = tensor.shape, tensor.dtype, tensor.stride()
        self.bits = flat.view(torch.uint8) if flat.numel() else flat

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bits) and self.layout == other.layout and torch.equal(self.bits, other.bits)

    __hash__ = None  # type: ignore[assignment]


def _is_same(before: Any, after: Any) -> bool:
    return before is after or bool(before == after)
