"""Bytes that are there before a step begins: parameters, and what optimizers hold or will hold of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from memfine_fx.compat.bitsandbytes import optimizer_state_bytes
from memfine_fx.compat.interpreter import every_optimizer
from memfine_fx.compat.tensors import storage_id

__all__ = ["foreseen_state_bytes", "living_optimizers", "static_terms"]


def static_terms(parameters: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Bytes by term: "parameters", and "optimizer state", what these optimizers hold of them now."""
    unique = list({id(parameter): parameter for parameter in parameters}.values())
    state_tensors = [
        tensor for optimizer in optimizers for parameter in unique for tensor in _state_of(optimizer, parameter)
    ]
    return {"parameters": _num_bytes(unique), "optimizer state": _num_bytes(state_tensors)}


def foreseen_state_bytes(parameters: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes that optimizers which have not stepped yet will hold of these parameters.

    Known of torch's own optimizers and of bitsandbytes', to the byte: a partition for a budget is made anew where
    this number changes. Others count as they are.
    """
    wanted = {id(parameter) for parameter in parameters}
    return sum(_foreseen_by(optimizer, wanted) for optimizer in optimizers)


def _foreseen_by(optimizer: torch.optim.Optimizer, wanted: Container[int]) -> int:
    left = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in wanted and parameter.requires_grad and not _state_of(optimizer, parameter)
    ]
    in_few_bits = optimizer_state_bytes(optimizer, [parameter for _, parameter in left])
    if in_few_bits is not None:
        return in_few_bits
    return sum(_state_bytes(optimizer, group, parameter) for group, parameter in left)


def living_optimizers(parameters: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Every optimizer over one of these parameters.

    NOTE: an optimizer is never registered anywhere, so the collector is asked. That takes a fraction of a second, which
    is why a session asks once; an optimizer made later shows itself when it steps.
    """
    wanted = {id(parameter) for parameter in parameters}
    optimizers = every_optimizer()
    return [
        optimizer
        for optimizer in optimizers
        if any(id(param) in wanted for group in optimizer.param_groups for param in group["params"])
    ]


def _state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
    state = optimizer.state.get(parameter, {})
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


_STATES: dict[str, Callable[[dict[str, Any]], tuple[int, int]]] = {
    "Adam": lambda group: (2 + bool(group.get("amsgrad")), 1),
    "AdamW": lambda group: (2 + bool(group.get("amsgrad")), 1),
    "NAdam": lambda group: (2, 2),
    "RAdam": lambda group: (2, 1),
    "Adamax": lambda group: (2, 1),
    "Adadelta": lambda group: (2, 1),
    "Rprop": lambda group: (2, 1),
    "SGD": lambda group: (int(bool(group.get("momentum"))), 0),
    "Muon": lambda group: (1, 0),
    "RMSprop": lambda group: (1 + bool(group.get("momentum")) + bool(group.get("centered")), 1),
}
"""State of an optimizer of torch for a parameter, by class name: tensors like it, and counts of steps or the like."""


def _state_bytes(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
    names = (base.__name__ for base in type(optimizer).__mro__)
    known = next((_STATES[name] for name in names if name in _STATES), None)
    if known is None:
        return 0
    num_tensors, num_counts = known(group)
    is_double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return num_tensors * parameter.numel() * parameter.element_size() + num_counts * (8 if is_double else 4)


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
