"""Bytes that are there before a step begins: parameters and optimizer state."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

__all__ = ["static_terms"]


def static_terms(parameters: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes by term of parameters and what hangs on them.

    Returns:
        "parameters", and "optimizer state" (what every optimizer over these parameters holds now; before its first
        step most hold nothing).
    """
    unique = list({id(parameter): parameter for parameter in parameters}.values())
    return {
        "parameters": _num_bytes(unique),
        "optimizer state": _num_bytes(_optimizer_state(unique)),
    }


def _optimizer_state(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    wanted = {id(parameter) for parameter in parameters}
    # NOTE: an optimizer is never registered anywhere, so the collector is asked for all of them; plans are made
    # once per shape, not per step.
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    return [
        value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if id(parameter) in wanted
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
