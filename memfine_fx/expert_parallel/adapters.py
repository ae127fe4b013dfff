"""Shard PEFT's adapters of expert weights (`target_parameters`): a rank holds the factors of its own experts.

    lora_A.weight   [E*r,in]     on this rank [E_local*r,in]
    lora_B.weight   [out,r*E]    on this rank [out,r*E_local], an expert's columns are E_local apart

Read as attributes, the factors are whole, as expert weights are. The class of PEFT's wrapper becomes a subclass that
computes W + s B A from the factors with the expert dimension first, so that lowering a region finds this rank's slices
of all three tensors; PEFT's own way would replace the weight by a parametrization, and with it lose the slice. Where a
parametrization already dequantizes the weight from 4 bits, its result includes the adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfine_fx.compat.nn import own_parameters
from memfine_fx.compat.peft import (
    active_adapters,
    adapters_on,
    factors_to_table,
    has_unknown_wrappers,
    parametrized_table,
    upcasts,
    updated_weight,
    wrapped_tables,
)
from memfine_fx.errors import ConfigError
from memfine_fx.expert_parallel.parameters import Layout, ShardedParameter

__all__ = ["EXPERTS_FIRST", "adapters_of", "add_by_slices"]

_WRAPPER = "_memfine_adapted_by"
EXPERTS_FIRST = "experts_first"
"""Attribute of a factor's module that reads as the whole factor, [E,...]."""


def adapters_of(model: nn.Module, tables: Sequence[ShardedParameter]) -> Iterator[ShardedParameter]:
    """Yield the factors of the adapters that PEFT adds to expert weights.

    Args:
        model: the whole model, before it is sharded.
        tables: the expert weights that will be sharded.

    Raises:
        ConfigError: an adapted expert weight is not among `tables`, or has a dtype in which PEFT does not add; or this
            version of PEFT is not known.
    """
    if has_unknown_wrappers(model):
        raise ConfigError("expert_parallel cannot share out adapters of experts' tables with this version of PEFT")
    by_table = {(parameter.module, parameter.name): parameter for parameter in tables if parameter.expert is None}
    paths = {module: path for path, module in model.named_modules()}
    for wrapper in wrapped_tables(model):
        name = f"{paths[wrapper]} ({wrapper.parameter_name})"
        packed = parametrized_table(wrapper)
        place = (wrapper.get_base_layer(), wrapper.parameter_name) if packed is None else (packed, "original")
        table = by_table.get(place)
        if table is None and wrapper.num_experts == 1:
            continue  # of a router or another plain matrix, which every rank has whole
        if table is None:
            raise ConfigError(
                f"expert_parallel cannot share out adapters of {name}: their table is no parameter [E,...] of experts"
            )
        if upcasts(wrapper):
            raise ConfigError(f"expert_parallel cannot share out adapters of {name}: PEFT does not add in its dtype")
        both: tuple[tuple[Layout, Any], ...] = (("rows", wrapper.lora_A), ("columns", wrapper.lora_B))
        for layout, factors in both:
            for adapter, linear in factors.items():
                yield ShardedParameter(
                    linear, "weight", paths[linear], tuple(linear.weight.shape), table.placement, None, table.ranks,
                    layout, wrapper.r[adapter],
                )  # fmt: skip


def add_by_slices(model: nn.Module) -> None:
    """Make each PEFT wrapper of a sharded expert weight add its adapters to this rank's slice of the weight."""
    for wrapper in wrapped_tables(model):
        if not any(hasattr(type(linear), EXPERTS_FIRST) for linear in wrapper.lora_A.values()):
            continue
        cls, packed = type(wrapper), parametrized_table(wrapper)
        if packed is not None:
            object.__setattr__(packed, _WRAPPER, (wrapper,))  # in a tuple, or it would be a submodule of its own part
            packed.__class__ = _subclass(type(packed), {"forward": _table_of(type(packed))})
        own = {"forward": _forward, "get_delta_weight": _delta_weight_of(cls), "merge": _merge, "unmerge": _merge}
        wrapper.__class__ = _subclass(cls, own)


def _subclass(cls: type[nn.Module], own: dict[str, Any]) -> type[nn.Module]:
    return type(cls.__name__, (cls,), own | {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _table_of(cls: Any) -> Any:
    def forward(self: Any) -> torch.Tensor:
        weight: torch.Tensor = cls.forward(self)
        (wrapper,) = getattr(self, _WRAPPER)
        for name in adapters_on(wrapper):
            weight = weight + wrapper.get_delta_weight(name).to(weight.dtype)
        return weight

    return forward


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if "adapter_names" in kwargs:
        raise ConfigError("adapters of single rows (adapter_names) cannot be added to tables that ranks share")
    if parametrized_table(self) is not None or not active_adapters(self):
        return self.base_layer(x, *args, **kwargs)
    path, weight = updated_weight(self)
    return torch.func.functional_call(self.base_layer, {path: weight}, (x, *args), kwargs)


def _delta_weight_of(cls: Any) -> Any:
    def get_delta_weight(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        a, b = self.lora_A[adapter_name], self.lora_B[adapter_name]
        if not hasattr(type(a), EXPERTS_FIRST):  # an adapter that was added since: every rank has it whole
            whole: torch.Tensor = cls.get_delta_weight(self, adapter_name, *args, **kwargs)
            return whole
        table = own_parameters(self.get_base_layer()).get(self.parameter_name)
        delta: torch.Tensor = torch.einsum(factors_to_table(self), b.experts_first, a.experts_first)
        delta = delta * self.scaling[adapter_name]
        return delta if table is None else delta.to(table.dtype)  # none: whoever makes it asked for this

    return get_delta_weight


def _merge(self: Any, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "adapters are not merged into tables that ranks share: take "
        "memfine_fx.expert_parallel.state.whole_state_dict(model) and merge in one process"
    )
