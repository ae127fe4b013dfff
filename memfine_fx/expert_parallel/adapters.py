"""PEFT's adapters on sharded tables (`target_parameters`): a rank holds the factors of its own experts.

    lora_A.weight   [E*r,in]     of this rank [E_local*r,in]
    lora_B.weight   [out,r*E]    of this rank [out,r*E_local], an expert's columns standing E_local apart

Read as attributes they are whole, as tables are. The wrapper's class becomes a subclass in which W + s B A is made of
the factors with experts first, so that lowering a region finds this rank's slices of all three; PEFT's own way would
put a parametrization in the place of the table, and with it lose the slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfine_fx.compat.nn import own_parameters
from memfine_fx.compat.peft import (
    active_adapters,
    factors_to_table,
    has_unknown_wrappers,
    upcasts,
    updated_weight,
    wrapped_tables,
)
from memfine_fx.errors import ConfigError
from memfine_fx.expert_parallel.parameters import Layout, ShardedParameter

__all__ = ["EXPERTS_FIRST", "adapters_of", "add_by_slices"]

EXPERTS_FIRST = "experts_first"
"""The attribute of a factor's module that is the whole factor as [E,...]."""


def adapters_of(model: nn.Module, tables: Sequence[ShardedParameter]) -> Iterator[ShardedParameter]:
    """The factors of the adapters that PEFT keeps beside tables.

    Args:
        model: whole.
        tables: that will be sharded.

    Raises:
        ConfigError: an adapted table is not among them, is packed, or is of a dtype in which PEFT does not add; or this
            version of PEFT is not known.
    """
    if has_unknown_wrappers(model):
        raise ConfigError("expert_parallel cannot share out adapters of experts' tables with this version of PEFT")
    by_table = {(one.module, one.name): one for one in tables if one.expert is None}
    paths = {module: path for path, module in model.named_modules()}
    for wrapper in wrapped_tables(model):
        name = f"{paths[wrapper]} ({wrapper.parameter_name})"
        table = by_table.get((wrapper.get_base_layer(), wrapper.parameter_name))
        if table is None and wrapper.num_experts == 1:
            continue  # of a router or another plain matrix, which every rank has whole
        if table is None:
            raise ConfigError(
                f"expert_parallel cannot share out adapters of {name}: their table is no parameter [E,...] of experts"
            )
        if upcasts(wrapper):
            raise ConfigError(f"expert_parallel cannot share out adapters of {name}: their table is packed")
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
        cls = type(wrapper)
        own = {"forward": _forward, "get_delta_weight": _delta_weight_of(cls), "merge": _merge, "unmerge": _merge}
        wrapper.__class__ = type(cls.__name__, (cls,), own | {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if "adapter_names" in kwargs:
        raise ConfigError("adapters of single rows (adapter_names) cannot be added to tables that ranks share")
    if not active_adapters(self):
        return self.base_layer(x, *args, **kwargs)
    path, weight = updated_weight(self)
    return torch.func.functional_call(self.base_layer, {path: weight}, (x, *args), kwargs)


def _delta_weight_of(cls: Any) -> Any:
    def get_delta_weight(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        a, b = self.lora_A[adapter_name], self.lora_B[adapter_name]
        if not hasattr(type(a), EXPERTS_FIRST):  # an adapter that was added since: every rank has it whole
            whole: torch.Tensor = cls.get_delta_weight(self, adapter_name, *args, **kwargs)
            return whole
        table = own_parameters(self.get_base_layer())[self.parameter_name]
        assert table is not None
        delta = torch.einsum(factors_to_table(self), b.experts_first, a.experts_first) * self.scaling[adapter_name]
        of_table: torch.Tensor = delta.to(table.dtype)
        return of_table

    return get_delta_weight


def _merge(self: Any, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "adapters are not merged into tables that ranks share: take "
        "memfine_fx.expert_parallel.state.whole_state_dict(model) and merge in one process"
    )
