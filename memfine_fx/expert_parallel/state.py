"""Save and load a model with sharded experts through torch.distributed.checkpoint.

    state = TrainingState(model, optimizer)
    dcp.save({"training": state}, checkpoint_id=folder)      # and on any number of ranks, later:
    dcp.load({"training": state}, checkpoint_id=folder)

Expert weights and their optimizer state are DTensors, so that they are saved in parts, once for all replicas, and can
be loaded on another number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from memfine_fx.expert_parallel.parameters import ShardedParameter
from memfine_fx.expert_parallel.shard import sharded_parameters

__all__ = ["TrainingState", "whole_state_dict"]


class TrainingState(Stateful):
    """A model with its optimizer, as torch.distributed.checkpoint saves and loads them.

    Args:
        model: with or without sharded experts.
        optimizer: of its parameters, or None for the model alone.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self._model.state_dict()}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer_state(self._optimizer)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._model.load_state_dict(state_dict["model"])
        if self._optimizer is not None:
            self._load_optimizer(self._optimizer, state_dict["optimizer"])

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state of each parameter, by the parameter's name, and its options."""
        _make_state(optimizer)
        sharded = sharded_parameters(self._model)
        state_by_name = {}
        for name, parameter in self._model.named_parameters():
            own = sharded.get(name)
            if parameter in optimizer.state and (own is None or own.is_here):
                state_by_name[name] = {
                    key: _as_saved(value, parameter, own) for key, value in optimizer.state[parameter].items()
                }
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return {"state": state_by_name, "options": options}

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        sharded = sharded_parameters(self._model)
        for name, parameter in self._model.named_parameters():
            for key, value in state["state"].get(name, {}).items():
                optimizer.state[parameter][key] = _heard(value, sharded.get(name))
        for group, options in zip(optimizer.param_groups, state["options"], strict=True):
            group.update(options)


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that never stepped allocate its state, which must exist to be loaded into.

    As in torch.distributed.checkpoint, it makes a step with zero gradients and a zero learning rate, which counts as a
    step.
    """
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]
    if optimizer.state or any(parameter.grad is not None for parameter in parameters):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


def _as_saved(value: Any, parameter: torch.Tensor, own: ShardedParameter | None) -> Any:
    is_alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return own.as_dtensor(value) if own is not None and is_alike else value


def _heard(value: Any, own: ShardedParameter | None) -> Any:
    is_part = own is not None and isinstance(value, torch.Tensor) and own.is_like_parameter(value)
    return own.from_state(value) if own is not None and is_part else value


def _parametrized(name: str) -> str:
    """Return the parameter of which bitsandbytes saves the packed numbers under `name`, the weight's name."""
    path, _, table = name.rpartition(".")
    return f"{path}.parametrizations.{table}.original"


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the unsharded model's state dict under its original keys, as host tensors; a collective call.

    Returns:
        On rank 0 of the expert group every entry, elsewhere an empty dict.
    """
    sharded = sharded_parameters(model)
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            own = sharded.get(name) or sharded.get(_parametrized(name))
            value = value.full_tensor() if own is None else own.whole_of(value)
        state[name] = value.detach().cpu()
    lists = {name: shard for name, shard in sharded.items() if shard.expert is not None}
    if lists:
        ranks = next(iter(lists.values())).ranks
        parts: list[dict[str, torch.Tensor]] = [{}] * ranks.num_ranks
        dist.all_gather_object(parts, {name: state[name] for name in lists if name in state}, group=ranks.group)
        for part in parts:
            state.update(part)
    is_first = all(shard.ranks.rank == 0 for shard in sharded.values())
    return state if is_first else {}
