"""PEFT's adapters on sharded tables (`target_parameters`): a rank holds the factors of its own experts.

    lora_A.weight   [E*r,in]     of this rank [E_local*r,in]
    lora_B.weight   [out,r*E]    of this rank [out,r*E_local], an expert's columns standing E_local apart

Read as attributes they are whole, as tables are. The wrapper's class becomes a subclass in which W + s B A is made of
the factors with experts first, so that lowering a region finds this rank's slices of all three; PEFT's own way would
put a parametrization in the place of the table, and with it lose the slice. Where a parametrization makes the table, of
numbers in 4 bits, it gives the sum.
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
"""The attribute of a factor's module that is the whole factor as [E,...]."""


def adapters_of(model: nn.Module, tables: Sequence[ShardedParameter]) -> Iterator[ShardedParameter]:
    """The factors of the adapters that PEFT keeps beside tables.

    Args:
        model: whole.
        tables: that will be sharded.

    Raises:
        ConfigError: an adapted table is not among them, or is of a dtype in which PEFT does not add; or this version of
            PEFT is not known.
    """
    if has_unknown_wrappers(model):
        raise ConfigError("expert_parallel cannot share out adapters of experts' tables with this version of PEFT")
    by_table = {(one.module, one.name): one for one in tables if one.expert is None}
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
    """Let each wrapper of a sharded table add its adapters to that."""
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
